"""Any decoder of transformers: packed passes give the logits of its own forward pass, or a refusal.

Tiny random models in float32. Measured, relative to the largest logit: at most 2.2e-6, where single
operations round at 1e-7.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

import specdec.lm.model
from specdec.lm.architecture import ModelLoadError, check_architecture, runnable
from specdec.lm.batch import Segment
from specdec.lm.fused import FusedDecoder
from specdec.lm.loading import load
from specdec.lm.model import FIXED_ROWS, CausalLM
from specdec.lm.pages import pages_for
from tests.models import byte_tokens, make_tokenizer

VOCABULARY = 160
BOUND = 5e-6
"""Of the difference between two logits, relative to the largest logit."""
LENGTHS = (70, 41, 9, 33, 33)
WINDOW = 23
"""Shorter than the sequences, and longer than the trial run of a start."""

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
MIXED = ["sliding_attention", "full_attention"]
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}


def _rope(kind: str, **parameters: float) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10_000.0, **parameters}}


LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
WINDOWS = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}

# The class of the configuration, and what differs from SIZES.
FUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, grouped queries": ("LlamaConfig", {}),
    "llama, all heads": ("LlamaConfig", {"num_key_value_heads": 4}),
    "llama, one key head": ("LlamaConfig", {"num_key_value_heads": 1}),
    "llama, biases": ("LlamaConfig", {"attention_bias": True, "mlp_bias": True}),
    "llama, tied": ("LlamaConfig", {"tie_word_embeddings": True}),
    "llama, large heads": ("LlamaConfig", {"head_dim": 16}),
    "llama, llama3 rope": ("LlamaConfig", _rope("llama3", **LLAMA3)),
    "llama, linear rope": ("LlamaConfig", _rope("linear", factor=4.0)),
    "llama, yarn": (
        "LlamaConfig",
        _rope("yarn", factor=4.0, original_max_position_embeddings=32),
    ),
    "qwen2": ("Qwen2Config", {}),
    "qwen2, windows": ("Qwen2Config", WINDOWS),
    "qwen3": ("Qwen3Config", {"head_dim": 16}),
    "qwen3, windows and biases": ("Qwen3Config", {**WINDOWS, "attention_bias": True}),
    "mistral": ("MistralConfig", {"sliding_window": WINDOW}),
}
GENERIC: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma": ("GemmaConfig", {"head_dim": 16}),
    "gemma2": (
        "Gemma2Config",
        {
            "head_dim": 16,
            "sliding_window": WINDOW,
            "query_pre_attn_scalar": 1,
            "attn_logit_softcapping": 4.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma3": (
        "Gemma3TextConfig",
        {"head_dim": 16, "sliding_window": WINDOW, "layer_types": MIXED},
    ),
    "phi3": ("Phi3Config", {"sliding_window": WINDOW}),
    "phi": ("PhiConfig", {}),
    "olmo2": ("Olmo2Config", {}),
    "olmo3": ("Olmo3Config", {"sliding_window": WINDOW, "layer_types": MIXED}),
    "granite": (
        "GraniteConfig",
        {
            "attention_multiplier": 0.3,
            "embedding_multiplier": 2.0,
            "residual_multiplier": 0.7,
            "logits_scaling": 3.0,
        },
    ),
    "starcoder2": ("Starcoder2Config", {"sliding_window": WINDOW}),
    "cohere2": ("Cohere2Config", {"sliding_window": WINDOW, "layer_types": MIXED}),
    "smollm3, a layer without rope": ("SmolLM3Config", {"no_rope_layers": [0, 1]}),
    "glm4": ("Glm4Config", {"head_dim": 16}),
    "gpt_neox": ("GPTNeoXConfig", {}),
    "gpt2": ("GPT2Config", {}),
    "opt": ("OPTConfig", {"ffn_dim": 48, "word_embed_proj_dim": 32}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "sliding_window": WINDOW}),
    "qwen3_moe": ("Qwen3MoeConfig", {"num_experts": 4, "head_dim": 16, **EXPERTS}),
    "afmoe": (
        "AfmoeConfig",
        {"num_experts": 4, "sliding_window": WINDOW, "layer_types": MIXED, **EXPERTS},
    ),
}


def config_of(case: tuple[str, dict[str, Any]]) -> PreTrainedConfig:
    name, differences = case
    config: PreTrainedConfig = getattr(transformers, name)(**{**SIZES, **differences})
    return config


def random_model(config: PreTrainedConfig) -> PreTrainedModel:
    """All parameters random, the biases and norms too, and large enough to matter."""
    model: PreTrainedModel = AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", dtype=torch.float32
    ).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim > 1:
                parameter.copy_(noise * 0.25)
            else:
                parameter.add_(noise * 0.2)
    return model


def random_sequences() -> list[list[int]]:
    numbers = random.Random(2)
    return [[numbers.randrange(VOCABULARY) for _ in range(length)] for length in LENGTHS]


@torch.inference_mode()
def plain_logits(model: PreTrainedModel, sequence: Sequence[int]) -> torch.Tensor:
    """[length, vocabulary]: what transformers gives for the sequence alone."""
    logits: torch.Tensor = model(input_ids=torch.tensor([sequence]), use_cache=False).logits[0]
    return logits


class Passes:
    """Feeds sequences to a model in ragged passes, and collects the logits of each token."""

    def __init__(self, model: CausalLM, sequences: list[list[int]]) -> None:
        self._model, self._sequences = model, sequences
        self._num_pages = [pages_for(len(sequence) + 8) for sequence in sequences]
        model.allocate(sum(self._num_pages))
        self.num_rollbacks = 0

    def feed(
        self, seed: int, *, all_logits: bool, max_rows: int = 512
    ) -> list[dict[int, torch.Tensor]]:
        """Feeds all sequences from their beginning, over whatever the pages hold.

        Returns:
            For each sequence the logits by position; without `all_logits`, of some.
        """
        numbers = random.Random(seed)
        pages = self._pages(numbers)
        found: list[dict[int, torch.Tensor]] = [{} for _ in self._sequences]
        done = [0] * len(self._sequences)
        while sum(done) < sum(LENGTHS):
            segments: list[Segment] = []
            places: list[dict[int, torch.Tensor]] = []
            for index, sequence in enumerate(self._sequences):
                rest = sequence[done[index] :]
                budget = max_rows - sum(len(segment.token_ids) for segment in segments)
                count = min(numbers.choice([1, 1, 1, 2, 5, 5, 9, 19]), len(rest), budget)
                if count == 0 or numbers.random() < 0.2:
                    continue
                num_logits = count if all_logits else numbers.choice([0, 1, count])
                tokens = rest[:count]
                wrong = done[index] > 0 and numbers.random() < 0.25
                if wrong:
                    # A rejected draft: what it leaves in the cache must not be seen afterwards.
                    tokens = [(token + 1) % VOCABULARY for token in tokens]
                    self.num_rollbacks += 1
                segments.append(Segment(tokens, done[index], pages[index], num_logits))
                places.append({} if wrong else found[index])
                done[index] += 0 if wrong else count
            if segments:
                self._run(segments, places)
        return found

    def _pages(self, numbers: random.Random) -> list[list[int]]:
        """One sequence has adjacent pages, the others what is left, in any order."""
        free = list(range(1, sum(self._num_pages) + 1))
        pages = [free[: self._num_pages[0]]]
        free = free[self._num_pages[0] :]
        numbers.shuffle(free)
        for count in self._num_pages[1:]:
            pages.append(free[:count])
            free = free[count:]
        return pages

    def _run(self, segments: list[Segment], places: list[dict[int, torch.Tensor]]) -> None:
        logits = self._model.forward(segments)
        assert len(logits) == sum(segment.num_logits for segment in segments)
        row = 0
        for segment, place in zip(segments, places, strict=True):
            end = segment.start + len(segment.token_ids)
            for position in range(end - segment.num_logits, end):
                place[position] = logits[row]
                row += 1


def packed_logits(model: CausalLM, sequences: list[list[int]], **limits: int) -> list[torch.Tensor]:
    """[2, length, vocabulary] for each sequence, by two runs over the same pages.

    Where the second run wants no logits there are those of the first.
    """
    passes = Passes(model, sequences)
    first = passes.feed(1, all_logits=True, **limits)
    second = passes.feed(2, all_logits=False, **limits)
    assert passes.num_rollbacks > 5
    both = zip(first, [{**a, **b} for a, b in zip(first, second, strict=True)], strict=True)
    return [
        torch.stack([torch.stack([run[i] for i in range(len(run))]) for run in runs])
        for runs in both
    ]


def assert_close(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    scale = max(float(logits.abs().max()) for logits in expected)
    worst = max(
        float((ours - theirs).abs().max()) for ours, theirs in zip(found, expected, strict=True)
    )
    assert worst <= BOUND * scale, f"{worst:.1e} of logits up to {scale:.1f}"


@pytest.mark.parametrize("case", FUSED.values(), ids=FUSED)
def test_the_fused_decoder_and_the_generic_one_give_the_plain_logits(
    case: tuple[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, sequences = random_model(config_of(case)), random_sequences()
    expected = [plain_logits(model, sequence) for sequence in sequences]
    with monkeypatch.context() as patch:
        patch.setattr(specdec.lm.model, "can_fuse", lambda model: False)
        generic = runnable(model, VOCABULARY)
    assert generic._fused is None
    by_modules = packed_logits(generic, sequences)
    assert_close(by_modules, expected)
    fused = CausalLM(model, VOCABULARY)
    assert isinstance(fused._fused, FusedDecoder)
    by_fusion = packed_logits(fused, sequences)
    assert_close(by_fusion, expected)
    assert_close(by_fusion, by_modules)


@pytest.mark.parametrize("case", GENERIC.values(), ids=GENERIC)
def test_other_decoders_give_the_plain_logits(case: tuple[str, dict[str, Any]]) -> None:
    model, sequences = random_model(config_of(case)), random_sequences()
    expected = [plain_logits(model, sequence) for sequence in sequences]
    ready = runnable(model, VOCABULARY)
    assert ready._fused is None
    assert_close(packed_logits(ready, sequences), expected)


@pytest.mark.parametrize("name", ["qwen3, windows and biases", "mistral", "gemma2", "gpt2"])
def test_passes_of_a_fixed_size_give_the_plain_logits(name: str) -> None:
    model, sequences = random_model(config_of({**FUSED, **GENERIC}[name])), random_sequences()
    expected = [plain_logits(model, sequence) for sequence in sequences]
    ready = runnable(model, VOCABULARY, deterministic=True)
    assert_close(packed_logits(ready, sequences, max_rows=FIXED_ROWS), expected)


def test_rows_of_padding_in_the_head_are_cut_off() -> None:
    for case in (FUSED["llama, tied"], GENERIC["gemma2"]):
        model, sequences = random_model(config_of(case)), random_sequences()
        sequences = [[token % 150 for token in sequence] for sequence in sequences]
        expected = [plain_logits(model, sequence)[:, :150] for sequence in sequences]
        ready = runnable(model, 150)
        assert ready.vocab_size == VOCABULARY
        assert_close(packed_logits(ready, sequences), expected)


class Doubled(torch.nn.Linear):
    """A layer whose weight is not all there is to it, as in a quantised model."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


def test_layers_of_other_types_are_not_fused() -> None:
    model, sequences = random_model(config_of(FUSED["qwen2"])), random_sequences()
    attention = model.model.layers[1].self_attn
    replaced = Doubled(32, 32)
    replaced.load_state_dict(attention.q_proj.state_dict())
    attention.q_proj = replaced
    expected = [plain_logits(model, sequence) for sequence in sequences]
    ready = runnable(model, VOCABULARY)
    assert ready._fused is None
    assert_close(packed_logits(ready, sequences), expected)


LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 4,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    **EXPERTS,
}
LONG = {
    "short_factor": [1.0] * 4,
    "long_factor": [2.0] * 4,
    "original_max_position_embeddings": 32,
}
# What keeps it from being run, and a part of the message.
REFUSED: dict[str, tuple[tuple[str, dict[str, Any]], str]] = {
    "recurrent layers": (("RecurrentGemmaConfig", {}), "its state cannot be rolled back"),
    "linear attention": (("Qwen3NextConfig", {}), "its state cannot be rolled back"),
    "chunked attention": (("Llama4TextConfig", {}), "its state cannot be rolled back"),
    "dynamic rope": (("LlamaConfig", _rope("dynamic", factor=4.0)), "with rope_type dynamic"),
    "long rope": (("Phi3Config", _rope("longrope", **LONG)), "with rope_type longrope"),
    "position biases, bloom": (("BloomConfig", {}), "outside of transformers' interface"),
    "position biases, falcon": (
        ("FalconConfig", {"alibi": True}),
        "outside of transformers' interface",
    ),
    "position biases, mpt": (
        ("MptConfig", {"d_model": 32, "n_heads": 4, "n_layers": 2}),
        "outside of transformers' interface",
    ),
    "attention sinks": (
        ("GptOssConfig", {"num_local_experts": 4, "head_dim": 16}),
        "attention with position biases or sinks",
    ),
    "a mask of its own": (("DogeConfig", {}), "attention with position biases or sinks"),
    "a window in the mask only": (
        ("PhimoeConfig", {"num_local_experts": 4, "sliding_window": WINDOW}),
        "a sliding window that only the mask knows",
    ),
    "windows in the masks only": (
        ("Qwen2MoeConfig", {"num_experts": 4, **WINDOWS, **EXPERTS}),
        "a sliding window that only the mask knows",
    ),
    "latent keys": (
        ("DeepseekV3Config", LATENT),
        "attention to other keys than those that it stores",
    ),
    "two attentions a layer": (("DiffLlamaConfig", {}), "layers that share keys and values"),
    "no arguments passed on": (("NemotronConfig", {}), "attention that is not told of the cache"),
}


def prepare(config: PreTrainedConfig) -> None:
    """The checks of a start, but for those of the files."""
    check_architecture(config)
    runnable(random_model(config), VOCABULARY)


@pytest.mark.parametrize(("case", "part"), REFUSED.values(), ids=REFUSED)
def test_what_would_be_computed_wrongly_is_refused(
    case: tuple[str, dict[str, Any]], part: str
) -> None:
    config = config_of(case)
    with pytest.raises(ModelLoadError) as caught:
        prepare(config)
    message = str(caught.value)
    assert message.startswith(f"architecture {config.model_type!r} is not supported")
    assert part in message
    assert "; choose a " in message
    assert "\n" not in message


def test_what_else_fails_in_the_trial_run_is_told_in_one_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("first\n  second")

    monkeypatch.setattr(CausalLM, "forward", fail)
    with pytest.raises(ModelLoadError, match=r"trial run failed \(RuntimeError: first second\)"):
        prepare(config_of(FUSED["qwen2"]))


@pytest.mark.parametrize("name", ["position biases, falcon", "dynamic rope", "latent keys"])
def test_files_of_such_a_model_do_not_load(name: str, tmp_path: Path) -> None:
    case, part = REFUSED[name]
    random_model(config_of(case)).save_pretrained(tmp_path)
    make_tokenizer(byte_tokens(VOCABULARY)).save_pretrained(tmp_path)
    with pytest.raises(ModelLoadError, match=part):
        load(str(tmp_path), device="cpu", dtype="float32")
