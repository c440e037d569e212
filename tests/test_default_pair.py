"""The embedded default pair: a real target, in fp32, against transformers' own decoding."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from draft_service.settings import DEFAULT_DRAFT
from specdec.models.cache import default_target_path
from specdec.models.pull import pull_default_target
from tests.stack import Stack, pair

PROMPTS = (
    "Write a Python function that reverses a string.",
    "What is the capital of France, and what is it known for?",
    "Explain to a child why the sky is blue.",
    "List five uses of a paper clip.",
    "Translate to German: The weather is nice today.",
    "Summarize the plot of Romeo and Juliet in two sentences.",
    "A train travels 120 km in 1.5 hours. How fast is it?",
    "Write a haiku about the sea.",
)
TOKENS = 64


@pytest.fixture(scope="module")
def default_target() -> Path:
    pull_default_target(None, lambda stage, done, total: None)
    return default_target_path()


@pytest.fixture(scope="module")
def prompts(default_target: Path) -> list[list[int]]:
    """The prompts in the target's chat template, as ids."""
    tokenizer = AutoTokenizer.from_pretrained(default_target)
    return [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=True
        )["input_ids"]
        for text in PROMPTS
    ]


@pytest.fixture(scope="module")
def expected(default_target: Path, prompts: list[list[int]]) -> list[list[int]]:
    """Transformers' greedy continuations of 64 tokens, past the end of the sequence."""
    model = AutoModelForCausalLM.from_pretrained(default_target, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    outputs = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        output = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=TOKENS
        )
        outputs.append(output[0, len(prompt) :].tolist())
    return outputs


async def greedy(stack: Stack, prompts: list[list[int]], k: int) -> list[list[int]]:
    results = await asyncio.gather(
        *(
            stack.generate(prompt, k=k, temperature=0.0, max_new_tokens=TOKENS, ignore_eos=True)
            for prompt in prompts
        )
    )
    for result in results:
        assert result.speculation.fallback_rounds == 0
        assert (result.speculation.num_accepted_tokens > 0) == (k > 0)
    return [result.token_ids for result in results]


@pytest.mark.slow
@pytest.mark.timeout(1200)
async def test_greedy_is_identical_to_transformers_for_every_k(
    default_target: Path, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    async with pair(default_target, DEFAULT_DRAFT, draft_patience_seconds=120.0) as stack:
        for k in (0, 1, 5, 8):
            assert await greedy(stack, prompts, k) == expected, f"k={k}"
