"""Generation through the three real services on loopback."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.stack import pair

PROMPT = [5, 6, 7, 8, 9]


def reference(folder: Path, prompt: list[int], count: int) -> list[int]:
    """What transformers' own greedy decoding gives."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.tensor([prompt])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count
    )
    return out[0, len(prompt) :].tolist()


async def test_greedy_is_identical_to_transformers_for_every_k(
    target_folder: Path, draft_folder: Path
) -> None:
    expected = reference(target_folder, PROMPT, 40)
    async with pair(target_folder, draft_folder) as stack:
        for k in range(9):
            result = await stack.generate(PROMPT, k=k, temperature=0.0, max_new_tokens=40)
            assert result.token_ids == expected, f"k={k}"


async def test_a_draft_that_is_the_target_is_always_accepted(target_folder: Path) -> None:
    async with pair(target_folder, target_folder) as stack:
        for rule in ("rejection", "block", "coupled"):
            result = await stack.generate(
                PROMPT, k=5, rule=rule, temperature=1.0, seed=3, max_new_tokens=60, ignore_eos=True
            )
            assert result.speculation.num_draft_tokens > 0
            # The sparse q keeps 64 of 300 entries.
            least = 0.99 if rule == "coupled" else 0.8
            assert result.speculation.acceptance_rate >= least, (rule, result.speculation)


@pytest.mark.parametrize("rule", ["rejection", "block", "coupled"])
async def test_the_same_seed_gives_the_same_tokens(
    target_folder: Path, draft_folder: Path, rule: str
) -> None:
    async with pair(target_folder, draft_folder) as stack:
        options = {"k": 4, "rule": rule, "seed": 7, "max_new_tokens": 30, "ignore_eos": True}
        first = await stack.generate(PROMPT, **options)
        again = await stack.generate(PROMPT, **options)
        other = await stack.generate(PROMPT, **{**options, "seed": 8})
        assert first.token_ids == again.token_ids != other.token_ids
        assert first.completion.seed == 7
