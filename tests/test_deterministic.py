"""Deterministic mode: a row's logits are the same bits whatever is beside it, and however it came.

Without it they are not, on the same machine with the same model: the tests show that too, so that
they would see if the mode did nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from specdec.lm.architecture import runnable
from specdec.lm.batch import Segment
from specdec.lm.loading import load
from specdec.lm.model import FIXED_ROWS, CausalLM
from specdec.models.cache import default_target_path, is_pulled
from tests.stack import Stack, pair

TOKENS = [3 + i * i % 250 for i in range(90)]
DTYPE = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])


def make(folder: Path, dtype: str, *, deterministic: bool = True) -> CausalLM:
    model = load(str(folder), dtype=dtype, deterministic=deterministic).model  # type: ignore[arg-type]
    model.allocate(120)
    return model


def feed(model: CausalLM, sizes: list[int], pages: list[int], beside: int = 0) -> torch.Tensor:
    """[T, V]: the logits after each of TOKENS, fed in chunks of these sizes.

    Args:
        model: any.
        sizes: they are repeated until all is fed.
        pages: of the sequence.
        beside: how many rows of others are in each pass, in front of it.
    """
    found, start, turn = [], 0, 0
    while start < len(TOKENS):
        chunk = TOKENS[start : start + sizes[turn % len(sizes)]]
        others = [Segment([7 + i + turn], 0, [100 + i], 1) for i in range(beside)]
        logits = model.forward([*others, Segment(chunk, start, pages, len(chunk))])
        found.append(logits[beside:])
        start, turn = start + len(chunk), turn + 1
    return torch.cat(found)


WAYS = {
    "one by one": ([1], [1, 2, 3, 4, 5, 6], 0),
    "in blocks, on other pages": ([6, 1, 3], [30, 9, 50, 2, 77, 41], 0),
    "beside others": ([5], [1, 2, 3, 4, 5, 6], 11),
    "in large chunks": ([FIXED_ROWS], [1, 2, 3, 4, 5, 6], 0),
    "in large chunks beside others": ([17, 30], [6, 5, 4, 3, 2, 1], 2),
}


@DTYPE
def test_every_way_gives_the_same_bits(target_folder: Path, dtype: str) -> None:
    model = make(target_folder, dtype)
    outputs = {name: feed(model, *way) for name, way in WAYS.items()}
    reference = outputs.pop("one by one")
    assert {name for name, output in outputs.items() if not torch.equal(output, reference)} == set()


SHAPES: dict[str, dict[str, Any]] = {
    "9 heads, 3 key heads": {"num_attention_heads": 9, "num_key_value_heads": 3},
    "4 heads, 4 key heads": {"num_attention_heads": 4, "num_key_value_heads": 4},
    "8 heads, 1 key head": {"num_attention_heads": 8, "num_key_value_heads": 1},
}


@pytest.fixture
def two_threads() -> Iterator[None]:
    """Kernels divide their work by the number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("family", ["Llama", "Gemma2", "Qwen3"])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_way_gives_the_same_bits_with_two_threads(family: str, shape: str) -> None:
    """Also with soft-capped scores and windows, and for any shape of the heads."""
    config = getattr(transformers, f"{family}Config")(
        vocab_size=260,
        hidden_size=72,
        intermediate_size=96,
        num_hidden_layers=2,
        head_dim=16,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
        **SHAPES[shape],
    )
    torch.manual_seed(2)
    raw = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model = runnable(raw, 260, deterministic=True)
    model.allocate(120)
    outputs = {name: feed(model, *way) for name, way in WAYS.items()}
    reference = outputs.pop("one by one")
    assert {name for name, output in outputs.items() if not torch.equal(output, reference)} == set()


def test_without_the_mode_they_differ(target_folder: Path) -> None:
    model = make(target_folder, "float32", deterministic=False)
    outputs = [feed(model, *way) for way in WAYS.values()]
    assert any(not torch.equal(output, outputs[0]) for output in outputs)
    assert all(torch.allclose(output, outputs[0], atol=1e-3) for output in outputs)


@pytest.mark.slow
@DTYPE
def test_the_default_target_gives_the_same_bits(dtype: str) -> None:
    if not is_pulled(default_target_path()):
        pytest.skip("the default model is not there")
    model = make(default_target_path(), dtype)
    outputs = {name: feed(model, *way) for name, way in WAYS.items()}
    reference = outputs.pop("one by one")
    assert {name for name, output in outputs.items() if not torch.equal(output, reference)} == set()


async def generate(stack: Stack, k: int, seed: int) -> list[int]:
    result = await stack.generate(
        TOKENS[: 20 + seed * 7], k=k, temperature=1.0, seed=seed, max_new_tokens=24, ignore_eos=True
    )
    return result.token_ids


async def test_the_output_is_the_same_alone_among_others_and_after_a_restart(
    target_folder: Path, draft_folder: Path
) -> None:
    options: dict[str, Any] = {
        "target_options": {"dtype": "bfloat16", "deterministic": True},
        "draft_options": {"dtype": "bfloat16"},
    }
    async with pair(target_folder, draft_folder, **options) as stack:
        alone = [await generate(stack, 0, seed) for seed in range(5)]
    async with pair(target_folder, draft_folder, **options) as stack:
        together = await asyncio.gather(
            *(generate(stack, k, seed) for seed in range(5) for k in (0, 3, 7, 32))
        )
        # A block of more rows than a pass has; and prefixes are cached now.
        again = [await generate(stack, 5 + seed, seed) for seed in range(5)]
    assert [together[4 * seed + i] for seed in range(5) for i in range(4)] == [
        tokens for tokens in alone for _ in range(4)
    ]
    assert again == alone
