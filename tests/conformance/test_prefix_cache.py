"""What requests share of their beginnings saves time, and changes nothing else."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from specdec.lm.pages import PAGE_SIZE
from specdec.v1.common_pb2 import PrefixCacheParams
from tests.stack import Result, Stack, pair

PROMPT = [3 + i * i % 250 for i in range(150)]
SHARED = (len(PROMPT) - 1) // PAGE_SIZE * PAGE_SIZE


@pytest_asyncio.fixture
async def stack(target_folder: Path, near_folder: Path) -> AsyncIterator[Stack]:
    """With an empty cache."""
    async with pair(target_folder, near_folder) as running:
        yield running


async def send(stack: Stack, rule: str = "coupled", **params: str | bool) -> Result:
    request = stack.gateway.request(
        PROMPT, k=3, rule=rule, temperature=0.9, seed=4, max_new_tokens=20, ignore_eos=True
    )
    request.prefix_cache.CopyFrom(PrefixCacheParams(**params))  # type: ignore[arg-type]
    return await stack.gateway.send(request)


def cached(result: Result) -> tuple[int, int]:
    """In the verifier and in the draft."""
    return result.completion.usage.cached_tokens, result.speculation.draft_cached_tokens


@pytest.mark.parametrize("rule", ["rejection", "block", "coupled"])
async def test_a_hit_changes_nothing_but_the_cached_tokens(stack: Stack, rule: str) -> None:
    cold, warm = [await send(stack, rule) for _ in range(2)]
    assert cached(cold) == (0, 0)
    assert cached(warm) == (SHARED, SHARED)
    assert warm.token_ids == cold.token_ids
    accepted = [result.speculation.num_accepted_tokens for result in (cold, warm)]
    assert accepted[0] == accepted[1]


async def test_the_output_is_shared_as_well_as_the_prompt(stack: Stack) -> None:
    """The next turn of a conversation begins with this one."""
    first = await send(stack)
    request = stack.gateway.request([*PROMPT, *first.token_ids, 9, 9], max_new_tokens=1)
    second = await stack.gateway.send(request)
    # The last token of a generation is never fed.
    held = (len(PROMPT) + len(first.token_ids) - 1) // PAGE_SIZE * PAGE_SIZE
    assert second.completion.usage.cached_tokens == held > SHARED


async def test_a_bypass_neither_uses_nor_leaves_anything(stack: Stack) -> None:
    first, second = [await send(stack, bypass=True) for _ in range(2)]
    third, fourth = [await send(stack) for _ in range(2)]
    fifth = await send(stack, bypass=True)
    assert [cached(r) for r in (first, second, third, fifth)] == [(0, 0)] * 4
    assert cached(fourth) == (SHARED, SHARED)
    assert len({tuple(r.token_ids) for r in (first, second, third, fourth, fifth)}) == 1


async def test_salts_keep_requests_apart(stack: Stack) -> None:
    results = [await send(stack, salt=salt) for salt in ("", "a", "b", "a")]
    assert [cached(result)[0] for result in results] == [0, 0, 0, SHARED]
    assert [cached(result)[1] for result in results] == [0, 0, 0, SHARED]
    assert len({tuple(result.token_ids) for result in results}) == 1
