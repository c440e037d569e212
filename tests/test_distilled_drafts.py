"""The folder of a distilled draft: how it is loaded and served, and what is refused."""

from __future__ import annotations

import json
import math
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from scipy import stats
from transformers import AutoModelForCausalLM

from specdec.distill import folder
from specdec.distill.student import Student, beginning_of
from specdec.lm import distilled
from specdec.lm.architecture import ModelLoadError
from specdec.lm.batch import Segment
from specdec.lm.loading import load
from specdec.models.cache import DEFAULT_TARGET_NAME
from tests.distillation import logits_after, raw
from tests.models import byte_tokens, make_model, make_tokenizer
from tests.stack import pair
from tests.test_architectures import FUSED, GENERIC, config_of, random_model

VOCABULARY = torch.tensor([token_id for token_id in range(300) if token_id % 4 != 1])
IDS = torch.randint(300, (40,), generator=torch.Generator().manual_seed(5)).tolist()


def make_draft(
    target: Path, to: Path, hidden_size: int | None = None, layers: Any = 2, noise: float = 0.02
) -> Student:
    """A student near its target, and its folder. Its weights are those that bfloat16 can hold."""
    model = raw(target)
    torch.manual_seed(1)
    student = Student(beginning_of(model, layers), VOCABULARY, hidden_size).eval()
    for parameter in student.parameters():
        noisy = parameter.data + noise * torch.randn(parameter.shape)
        parameter.data = noisy.bfloat16().float()
    folder.save(student, folder.base_of(model, str(target)), to)
    return student


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory, target_folder: Path) -> Path:
    to = tmp_path_factory.mktemp("distilled") / "draft"
    make_draft(target_folder, to)
    return to


def packed_logits(path: Path, **options: Any) -> torch.Tensor:
    """float32 [40, vocabulary], in two passes, of a draft that has another sequence beside it."""
    model = load(str(path), device="cpu", dtype="float32", **options).model
    model.allocate(8)
    part = 20
    first = model.forward([Segment(IDS[:part], 0, [3, 1, 5], part), Segment([1, 2], 0, [2], 1)])
    rest = [
        model.forward([Segment(IDS[part:30], part, [3, 1, 5], 10)]),
        model.forward([Segment(IDS[30:], 30, [3, 1, 5], 10)]),
    ]
    return torch.cat([first[:part], *rest])


@torch.no_grad()
def student_logits(student: Student) -> torch.Tensor:
    found: torch.Tensor = student(torch.tensor([IDS]))[0] @ student.head.T
    return found


@pytest.mark.parametrize("options", [{}, {"deterministic": True}], ids=["plain", "deterministic"])
@pytest.mark.parametrize("hidden_size", [None, 16])
def test_a_draft_proposes_what_the_student_learned(
    tmp_path: Path, target_folder: Path, hidden_size: int | None, options: Any
) -> None:
    student = make_draft(target_folder, tmp_path, hidden_size)
    found = packed_logits(tmp_path, **options)
    assert found.shape == (40, 300)
    assert torch.allclose(found[:, VOCABULARY], student_logits(student), atol=2e-4)
    outside = [token_id for token_id in range(300) if token_id not in VOCABULARY]
    assert bool((found[:, outside] == -math.inf).all())


def test_half_precision_is_near(draft: Path, target_folder: Path, tmp_path: Path) -> None:
    student = make_draft(target_folder, tmp_path)
    model = load(str(tmp_path), device="cpu", dtype="bfloat16").model
    model.allocate(8)
    found = model.forward([Segment(IDS, 0, [3, 1, 5], 40)]).float()[:, VOCABULARY]
    expected = student_logits(student)
    assert float((found - expected).norm() / expected.norm()) < 0.03


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "mistral", "phi3", "olmo2"])
def test_drafts_of_other_architectures(tmp_path: Path, name: str) -> None:
    model = random_model(config_of({**FUSED, **GENERIC}[name]))
    model.save_pretrained(tmp_path / "target")
    make_tokenizer(byte_tokens(150)).save_pretrained(tmp_path / "target")
    student = Student(beginning_of(model, 1), torch.arange(0, 150, 2)).eval()
    for parameter in student.parameters():
        parameter.data = parameter.data.bfloat16().float()
    folder.save(student, folder.base_of(model, str(tmp_path / "target")), tmp_path / "draft")
    draft = load(str(tmp_path / "draft"), device="cpu", dtype="float32").model
    # Both the runtime's own decoder and that of transformers run drafts.
    assert (draft._fused is not None) == (name in FUSED)
    draft.allocate(8)
    tokens = [token_id % 150 for token_id in IDS]
    found = draft.forward([Segment(tokens, 0, [3, 1, 5], 40)])[:, :150:2]
    with torch.no_grad():
        expected = student(torch.tensor([tokens]))[0] @ student.head.T
    assert torch.allclose(found, expected, atol=2e-4)


def test_a_tied_target_gives_a_draft_with_a_head_of_its_own(tmp_path: Path) -> None:
    model = random_model(config_of(FUSED["llama, tied"]))
    model.save_pretrained(tmp_path / "target")
    make_tokenizer(byte_tokens(160)).save_pretrained(tmp_path / "target")
    student = Student(beginning_of(model, 2), torch.arange(160))
    folder.save(student, folder.base_of(model, str(tmp_path / "target")), tmp_path / "draft")
    assert "lm_head.weight" in load_file(tmp_path / "draft" / "model.safetensors")
    draft = load(str(tmp_path / "draft"), device="cpu", dtype="float32").model
    draft.allocate(4)
    tokens = [1, 5, 9]
    expected = logits_after(model, tokens)
    found = draft.forward([Segment(tokens, 0, [1], 1)])[0]
    assert float((found - expected).norm() / expected.norm()) < 0.03


def test_embeddings_and_tokenizer_stay_with_the_target(draft: Path, target_folder: Path) -> None:
    assert sorted(path.name for path in draft.iterdir()) == ["config.json", "model.safetensors"]
    weights = load_file(draft / "model.safetensors")
    assert not [name for name in weights if "embed" in name]
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}
    target, found = (
        load(str(path), device="cpu", dtype="float32") for path in (target_folder, draft)
    )
    assert found.tokenizer == target.tokenizer
    assert found.eos_token_ids == target.eos_token_ids
    assert found.max_context_length == target.max_context_length


def test_a_target_in_several_files_is_read(tmp_path: Path, target_folder: Path) -> None:
    target = tmp_path / "target"
    raw(target_folder).save_pretrained(target, max_shard_size="20KB")
    make_tokenizer(byte_tokens(300)).save_pretrained(target)
    assert not (target / "model.safetensors").exists()
    student = make_draft(target, tmp_path / "draft")
    found = packed_logits(tmp_path / "draft")
    assert torch.allclose(found[:, VOCABULARY], student_logits(student), atol=2e-4)


def test_a_target_that_was_moved_is_named_anew(
    tmp_path: Path, draft: Path, target_folder: Path
) -> None:
    moved, other = tmp_path / "moved", tmp_path / "draft"
    shutil.copytree(target_folder, moved)
    shutil.copytree(draft, other)
    change(other, lambda config: config["specdec_draft"]["base"].update(model_id="/gone"))
    with pytest.raises(ModelLoadError, match="/gone"):
        load(str(other), device="cpu")
    assert torch.equal(packed_logits(other, base=str(moved)), packed_logits(draft))


# What does not fit is refused, by a line that says what to do.


def change(path: Path, how: Any) -> None:
    config = json.loads((path / "config.json").read_text())
    how(config)
    (path / "config.json").write_text(json.dumps(config))


def test_another_revision_of_the_target_is_refused(
    tmp_path: Path, draft: Path, target_folder: Path
) -> None:
    other = tmp_path / "other"
    shutil.copytree(target_folder, other)
    model: Any = AutoModelForCausalLM.from_pretrained(other)
    model.get_input_embeddings().weight.data[7, 3] += 1e-3
    model.save_pretrained(other)
    with pytest.raises(ModelLoadError, match="not the model that the draft was distilled from"):
        load(str(draft), device="cpu", base=str(other))


def test_a_target_of_another_size_is_refused(tmp_path: Path, draft: Path) -> None:
    other = make_model(tmp_path / "other", seed=1, rows=290)
    with pytest.raises(ModelLoadError, match="not the model that the draft was distilled from"):
        load(str(draft), device="cpu", base=str(other))


def test_a_default_target_that_was_not_pulled_is_asked_for(
    tmp_path: Path, draft: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distilled, "is_pulled", lambda folder: False)
    shutil.copytree(draft, tmp_path / "draft")
    change(
        tmp_path / "draft",
        lambda config: config["specdec_draft"]["base"].update(model_id=DEFAULT_TARGET_NAME),
    )
    with pytest.raises(ModelLoadError, match="specdec models pull"):
        load(str(tmp_path / "draft"), device="cpu")


DAMAGE: dict[str, Any] = {
    "no base": lambda config: config["specdec_draft"].pop("base"),
    "no vocabulary": lambda config: config["specdec_draft"].pop("vocabulary"),
    "a base of another form": lambda config: config["specdec_draft"]["base"].update(more=1),
    "no section": lambda config: config.update(specdec_draft=3),
    "a shorter vocabulary": lambda config: config["specdec_draft"]["vocabulary"].pop(),
    "tokens that there are not": lambda config: config["specdec_draft"]["vocabulary"].append(999),
    "more layers": lambda config: config.update(num_hidden_layers=3),
    "fewer layers": lambda config: config.update(num_hidden_layers=1),
    "another width": lambda config: config.update(intermediate_size=48),
    "no such architecture": lambda config: config.update(model_type="none-such"),
    "no such tensor": lambda config: config["specdec_draft"]["base"].update(embedding="none"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_config_is_refused(tmp_path: Path, draft: Path, name: str) -> None:
    shutil.copytree(draft, tmp_path / "draft")
    change(tmp_path / "draft", DAMAGE[name])
    with pytest.raises(ModelLoadError) as caught:
        load(str(tmp_path / "draft"), device="cpu")
    assert "\n" not in str(caught.value)


def test_a_config_that_was_cut_off_is_refused(tmp_path: Path, draft: Path) -> None:
    shutil.copytree(draft, tmp_path / "draft")
    path = tmp_path / "draft" / "config.json"
    path.write_text(path.read_text()[:-40])
    with pytest.raises(ModelLoadError, match=r"config\.json"):
        load(str(tmp_path / "draft"), device="cpu")


@pytest.mark.parametrize("name", ["lm_head.weight", "model.norm.weight", "unknown.weight"])
def test_weights_that_do_not_fit_are_refused(tmp_path: Path, draft: Path, name: str) -> None:
    shutil.copytree(draft, tmp_path / "draft")
    path = tmp_path / "draft" / "model.safetensors"
    weights = load_file(path)
    if weights.pop(name, None) is None:
        weights[name] = torch.zeros(3)
    save_file(weights, path)
    with pytest.raises(ModelLoadError, match=rf"do not fit its config \({name}\)"):
        load(str(tmp_path / "draft"), device="cpu")


def test_weights_that_are_missing_are_asked_for(tmp_path: Path, draft: Path) -> None:
    shutil.copytree(draft, tmp_path / "draft")
    (tmp_path / "draft" / "model.safetensors").unlink()
    with pytest.raises(ModelLoadError, match=r"model\.safetensors"):
        load(str(tmp_path / "draft"), device="cpu")


def test_a_target_whose_files_hold_no_embeddings_is_refused(
    tmp_path: Path, target_folder: Path
) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    with pytest.raises(ModelLoadError, match="must hold safetensors"):
        folder.base_of(raw(target_folder), str(file))


def test_other_folders_are_no_drafts(tmp_path: Path, target_folder: Path, draft: Path) -> None:
    assert distilled.read(target_folder) is None
    assert distilled.read(tmp_path) is None
    assert distilled.read("some/model") is None
    assert distilled.read(draft) is not None


# Served.

PROMPTS = [[20, 21, 22], IDS[:33], [5]]


@pytest.fixture(scope="module")
def greedy(target_folder: Path) -> list[list[int]]:
    model, found = raw(target_folder), []
    for prompt in PROMPTS:
        tokens = list(prompt)
        for _ in range(24):
            tokens.append(int(logits_after(model, tokens).argmax()))
        found.append(tokens[len(prompt) :])
    return found


@pytest.mark.parametrize("deterministic", [False, True])
async def test_greedy_text_is_the_targets(
    target_folder: Path, draft: Path, greedy: list[list[int]], deterministic: bool
) -> None:
    options = {"deterministic": deterministic}
    accepted = 0
    async with pair(target_folder, draft, target_options=options, draft_options=options) as stack:
        for rule in ("rejection", "block", "coupled"):
            for prompt, expected in zip(PROMPTS, greedy, strict=True):
                result = await stack.generate(
                    prompt, k=4, rule=rule, temperature=0.0, max_new_tokens=24, ignore_eos=True
                )
                assert result.token_ids == expected
                assert not result.speculation.fallback_reason
                accepted += result.speculation.num_accepted_tokens
    assert accepted > 20


async def test_coupled_text_is_the_targets_whatever_the_draft(
    target_folder: Path, draft: Path
) -> None:
    async with pair(target_folder, draft) as stack:
        for seed in range(4):
            texts = []
            for k in (0, 1, 5):
                result = await stack.generate(
                    [20, 21], k=k, rule="coupled", seed=seed, max_new_tokens=24, ignore_eos=True
                )
                texts.append(result.token_ids)
            assert texts[0] == texts[1] == texts[2]


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["rejection", "block"])
async def test_sampled_text_has_the_targets_distribution(
    target_folder: Path, draft: Path, rule: str
) -> None:
    """The second token, which is drafted together with the first. Some of the target's tokens are
    not in the draft's vocabulary. A right rule fails once in 10,000 runs; seeds are fixed."""
    prompt, draws = [20, 21], 500
    model = raw(target_folder)
    first = logits_after(model, prompt).softmax(-1).double()
    likely = torch.topk(first, 60).indices.tolist()
    law = sum(first[t] * logits_after(model, [*prompt, t]).softmax(-1).double() for t in likely)
    assert isinstance(law, torch.Tensor)
    law = law / law.sum()
    seen: Counter[int] = Counter()
    async with pair(target_folder, draft) as stack:
        for seed in range(draws // 10):
            request = stack.gateway.request(
                prompt, k=2, rule=rule, seed=seed, max_new_tokens=3, ignore_eos=True, n=10
            )
            for result in await stack.gateway.send_for_samples(request):
                if result.token_ids[0] in likely:
                    seen[result.token_ids[1]] += 1
    total = sum(seen.values())
    common = [t for t in range(300) if float(law[t]) * total >= 8]
    assert any(t not in VOCABULARY for t in common)
    counts = [seen[t] for t in common]
    expected = [float(law[t]) * total for t in common]
    counts.append(total - sum(counts))
    expected.append(total - sum(expected))
    assert float(stats.chisquare(counts, expected).pvalue) > 1e-4


async def test_a_draft_that_knows_none_of_the_allowed_tokens_proposes_nothing(
    target_folder: Path, draft: Path
) -> None:
    """Neither an error nor a forbidden token: the target goes on alone, and the draft stays."""
    unknown = [token_id for token_id in range(1, 60) if token_id not in VOCABULARY]
    async with pair(target_folder, draft) as stack:
        for rule in ("rejection", "block", "coupled"):
            for temperature in (0.0, 1.0):
                result = await stack.generate(
                    [20, 21],
                    k=3,
                    rule=rule,
                    temperature=temperature,
                    allowed_token_ids=unknown,
                    max_new_tokens=6,
                    ignore_eos=True,
                )
                assert set(result.token_ids) <= set(unknown)
                assert len(result.token_ids) == 6
                assert result.speculation.num_draft_tokens == 0
                assert result.speculation.fallback_reason == "the draft proposed nothing"
