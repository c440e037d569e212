"""A draft of another family, with another tokenizer, through the services."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from draft_service.registry import make_drafter
from draft_service.settings import DraftSettings
from draft_service.special_tokens import Vocabulary
from draft_service.translation import Translated, Translation
from specdec.lm.architecture import ModelLoadError
from specdec.lm.tokenizer_loading import load_tokenizer
from specdec.serving import StartError
from tests.stack import Stack, pair
from tests.vocabularies import SENTENCES, byte_level, unigram

pytestmark = pytest.mark.slow

STORY = "".join(SENTENCES[:3])
PROMPT = "the quick brown fox jumps"
_WINDOW = 192
"""Tokens that the models have seen at once: they know no longer contexts."""
TARGET = partial(byte_level, 700, "<eos>", ("<|user|>",))


def trained_model(folder: Path, vocabulary: Vocabulary, *, seed: int) -> Path:
    """A small model that knows the story by heart, and its tokenizer."""
    torch.manual_seed(seed)
    tokenizer = vocabulary.tokenizer
    size = tokenizer.get_vocab_size()
    config = LlamaConfig(
        vocab_size=size,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        bos_token_id=vocabulary.bos_token_id,
        eos_token_id=vocabulary.eos_token_ids[0],
    )
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    stream = torch.tensor(tokenizer.encode(STORY * 8, add_special_tokens=False).ids)
    beginning = [] if vocabulary.bos_token_id is None else [vocabulary.bos_token_id]
    for _ in range(150):
        starts = torch.randint(len(stream) - _WINDOW, (4, 1))
        batch = stream[starts + torch.arange(_WINDOW)]
        if beginning:
            batch = torch.cat([torch.tensor([beginning]).expand(4, 1), batch], dim=1)
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.generation_config.eos_token_id = vocabulary.eos_token_ids[0]
    model.save_pretrained(folder)
    special = {"eos_token": tokenizer.id_to_token(vocabulary.eos_token_ids[0])}
    if vocabulary.bos_token_id is not None:
        special["bos_token"] = tokenizer.id_to_token(vocabulary.bos_token_id)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target, and a draft that has learnt the same text in other tokens."""
    folder = tmp_path_factory.mktemp("translated")
    return (
        trained_model(folder / "target", TARGET(), seed=1),
        trained_model(folder / "draft", unigram(), seed=2),
    )


def translated(folders: tuple[Path, Path], **options: object) -> dict[str, object]:
    return {"target_tokenizer": str(folders[0]), **options}


async def outputs(stack: Stack, *, k: int) -> list[list[int]]:
    found = []
    for number, prompt in enumerate((PROMPT, "def merge", "naïve 日本語 😀, the lazy", "\x00\n ")):
        for rule, temperature in (("coupled", 0.0), ("coupled", 1.0), ("rejection", 0.0)):
            result = await stack.generate(
                prompt,
                k=k,
                rule=rule,
                seed=number,
                temperature=temperature,
                max_new_tokens=40,
                ignore_eos=True,
            )
            assert not result.speculation.fallback_reason or k == 0
            found.append(result.token_ids)
    return found


async def acceptance_rate(stack: Stack, **options: object) -> float:
    greedy = {"temperature": 0.0, **options}
    result = await stack.generate(PROMPT, max_new_tokens=40, ignore_eos=True, k=4, **greedy)
    assert result.speculation.num_draft_tokens > 0
    return float(result.speculation.acceptance_rate)


@pytest.mark.parametrize("drafters", ["model", "lookup,model"])
async def test_greedy_and_coupled_output_is_that_of_plain_decoding(
    folders: tuple[Path, Path], drafters: str
) -> None:
    options = translated(folders, drafters=drafters)
    async with pair(*folders, draft_options=options) as stack:
        plain = await outputs(stack, k=0)
        for k in (1, 3, 8):
            assert await outputs(stack, k=k) == plain


async def test_a_draft_that_knows_the_text_in_other_tokens_is_mostly_accepted(
    folders: tuple[Path, Path],
) -> None:
    async with pair(*folders, draft_options=translated(folders)) as stack:
        assert await acceptance_rate(stack) > 0.7
        sampled = await acceptance_rate(stack, temperature=0.5, rule="rejection", seed=5)
        assert sampled > 0.4


async def test_proposals_that_are_off_by_a_token_would_be_rejected(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the assertions on the acceptance rate would notice."""
    original = Translation.translate

    def off_by_one(self: Translation, drafted: Sequence[int], limit: int) -> Translated:
        found = original(self, drafted, limit + 1)
        return found._replace(token_ids=found.token_ids[1:])

    monkeypatch.setattr(Translation, "translate", off_by_one)
    async with pair(*folders, draft_options=translated(folders)) as stack:
        assert await acceptance_rate(stack) < 0.2


async def test_the_handshake_speaks_of_the_targets_tokens(folders: tuple[Path, Path]) -> None:
    async with pair(*folders, draft_options=translated(folders)) as stack:
        target, draft = stack.verifier.runtime, stack.draft
        assert target is not None
        assert draft is not None
        assert draft.servicer.drafter is not None
        said, expected = draft.servicer.drafter.info, target.info
        assert said.tokenizer_sha256 == expected.tokenizer_sha256
        assert said.vocab_size == expected.vocab_size
        assert said.effective_vocab_size == expected.effective_vocab_size
        assert list(said.eos_token_ids) == list(expected.eos_token_ids)
        assert said.certain_drafts
        assert not said.any_tokenizer


def test_a_tokenizer_is_loaded_without_its_model(folders: tuple[Path, Path]) -> None:
    loaded = load_tokenizer(str(folders[0]))
    assert loaded.eos_token_ids == tuple(TARGET().eos_token_ids)
    assert loaded.vocab_size == TARGET().tokenizer.get_vocab_size()


def test_a_target_tokenizer_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="there is no file or folder"):
        load_tokenizer(str(tmp_path / "nowhere"))


def test_a_target_tokenizer_without_a_model_is_refused() -> None:
    settings = DraftSettings(drafters=["lookup"], target_tokenizer="somewhere")
    with pytest.raises(StartError, match="--target-tokenizer"):
        make_drafter(settings)


async def test_the_services_books_agree_after_contexts_that_are_encoded_anew(
    folders: tuple[Path, Path],
) -> None:
    """Shared pages are not written, so that a prompt that comes again is drafted as before."""
    async with pair(*folders, draft_options=translated(folders)) as stack:
        first = await stack.generate(
            STORY * 2, max_new_tokens=30, ignore_eos=True, k=5, temperature=0.0
        )
        for cut in range(1, 30, 4):
            await stack.generate((STORY * 2)[:-cut], max_new_tokens=9, ignore_eos=True, k=5)
        again = await stack.generate(
            STORY * 2, max_new_tokens=30, ignore_eos=True, k=5, temperature=0.0
        )
        assert stack.draft is not None
        runtime = stack.draft.runtime
        assert runtime is not None
        await runtime.thread.run(runtime.scheduler.residents.check_integrity)
    assert again.speculation.draft_cached_tokens > 0
    assert list(again.speculation.accepted_per_position) == list(
        first.speculation.accepted_per_position
    )


async def test_a_context_that_is_too_long_for_the_draft_is_decoded_plainly(
    folders: tuple[Path, Path],
) -> None:
    options = translated(folders, max_context_length=64)
    async with pair(*folders, draft_options=options) as stack:
        plain = await stack.generate(
            PROMPT, max_new_tokens=90, ignore_eos=True, k=0, temperature=0.0
        )
        result = await stack.generate(
            PROMPT, max_new_tokens=90, ignore_eos=True, k=4, temperature=0.0
        )
    assert result.token_ids == plain.token_ids
    assert result.speculation.num_accepted_tokens > 0


async def test_penalties_and_masks_are_obeyed_though_the_draft_does_not_know_them(
    folders: tuple[Path, Path],
) -> None:
    often = TARGET().tokenizer.encode(" over the", add_special_tokens=False).ids
    async with pair(*folders, draft_options=translated(folders)) as stack:
        for options in ({"repetition_penalty": 1.5}, {"suppressed_token_ids": often}):
            plain, drafted = [
                await stack.generate(
                    PROMPT,
                    k=k,
                    max_new_tokens=30,
                    temperature=0.7,
                    seed=3,
                    rule="coupled",
                    **options,
                )
                for k in (0, 4)
            ]
            assert drafted.token_ids == plain.token_ids
            assert drafted.speculation.num_draft_tokens > 0
