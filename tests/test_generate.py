"""Generation through the three real services on loopback."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import pytest
import torch
from transformers import AutoModelForCausalLM

from specdec.v1 import gateway_pb2, gateway_pb2_grpc
from tests.models import make_model
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


async def test_coupled_output_is_a_function_of_target_prompt_and_seed(
    target_folder: Path, draft_folder: Path, tmp_path: Path
) -> None:
    stranger = make_model(tmp_path / "stranger", seed=99, rows=300)
    options = {"rule": "coupled", "seed": 11, "max_new_tokens": 40, "ignore_eos": True}
    outputs = []
    for draft in (None, draft_folder, stranger):
        async with pair(target_folder, draft) as stack:
            for k in (0, 1, 5, 8):
                result = await stack.generate(PROMPT, k=k, **options)
                outputs.append(result.token_ids)
    assert all(output == outputs[0] for output in outputs)


@pytest.mark.parametrize("max_new_tokens", range(1, 12))
async def test_exactly_as_many_tokens_as_asked_for(
    target_folder: Path, max_new_tokens: int
) -> None:
    async with pair(target_folder, target_folder) as stack:
        result = await stack.generate(
            PROMPT, k=5, temperature=0.0, max_new_tokens=max_new_tokens, ignore_eos=True
        )
        assert len(result.token_ids) == max_new_tokens == result.completion.usage.completion_tokens
        assert result.completion.finish_reason == gateway_pb2.FINISH_REASON_LENGTH


async def test_a_stop_inside_a_block_means_what_it_means_in_plain_decoding(
    target_folder: Path,
) -> None:
    plain = reference(target_folder, PROMPT, 10)
    # The draft is the target, so that every stop falls inside an accepted block.
    async with pair(target_folder, target_folder) as stack:
        for stop in plain:
            result = await stack.generate(
                PROMPT,
                k=8,
                temperature=0.0,
                max_new_tokens=10,
                stop_token_ids=[stop],
                ignore_eos=True,
            )
            assert result.token_ids == plain[: plain.index(stop) + 1]
            assert result.completion.finish_reason == gateway_pb2.FINISH_REASON_STOP
            assert result.completion.matched_token_id == stop
            assert result.completion.usage.completion_tokens == len(result.token_ids)


async def test_a_full_context_ends_with_length_and_k_is_clamped(
    tmp_path: Path,
) -> None:
    model = make_model(tmp_path / "short", seed=1, rows=300, context=32)
    async with pair(model, model) as stack:
        for length in (20, 27, 28, 29, 30, 31):
            result = await stack.generate(
                list(range(1, length + 1)), k=5, temperature=0.0, ignore_eos=True
            )
            assert len(result.token_ids) == 32 - length
            assert result.completion.finish_reason == gateway_pb2.FINISH_REASON_LENGTH


async def test_every_token_has_its_origin_and_its_text(
    target_folder: Path, draft_folder: Path
) -> None:
    async with pair(target_folder, draft_folder) as stack:
        result = await stack.generate(
            PROMPT, k=4, temperature=1.0, seed=5, max_new_tokens=50, ignore_eos=True
        )
        plain = await stack.generate(PROMPT, k=0, seed=5, max_new_tokens=50, ignore_eos=True)
    assert len(result.origins) == len(result.token_texts) == len(result.token_ids) == 50
    assert "".join(result.token_texts) == result.text
    accepted = result.origins.count(gateway_pb2.TOKEN_ORIGIN_ACCEPTED)
    # No stop cut a block short here, so that all that was accepted was also sent.
    assert accepted == result.speculation.num_accepted_tokens > 0
    assert accepted == sum(result.speculation.accepted_per_position)
    assert sum(result.speculation.drafted_per_position) == result.speculation.num_draft_tokens
    others = len(result.origins) - accepted
    assert others == result.speculation.rounds
    assert set(plain.origins) == {gateway_pb2.TOKEN_ORIGIN_PLAIN}
    assert plain.speculation.fallback_rounds == 0


async def test_sessions_are_gone_after_generations_and_cancelled_calls(
    target_folder: Path, draft_folder: Path
) -> None:
    async with pair(target_folder, draft_folder) as stack:
        await stack.generate(PROMPT, k=3, max_new_tokens=5, ignore_eos=True)
        request = stack.gateway.request(PROMPT, k=3, max_new_tokens=400, ignore_eos=True)
        stub = gateway_pb2_grpc.GenerationServiceStub(stack.gateway.channel)
        for _ in range(5):
            call = stub.Generate(request)
            await call.read()
            call.cancel()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stack.gateway.send(request, timeout=0.05)
        assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        runtimes = (stack.verifier.runtime, stack.draft.runtime if stack.draft else None)
        for _ in range(100):
            if all(runtime is not None and runtime.num_sessions == 0 for runtime in runtimes):
                break
            await asyncio.sleep(0.02)
        else:
            pytest.fail("sessions live on without a client")


async def test_many_sessions_at_once_give_what_each_gives_alone(
    target_folder: Path, draft_folder: Path
) -> None:
    async with pair(target_folder, draft_folder) as stack:

        async def one(index: int) -> list[int]:
            result = await stack.generate(
                [*PROMPT, index + 1],
                k=index % 6,
                rule=("rejection", "block", "coupled")[index % 3],
                temperature=(0.0, 0.8)[index % 2],
                seed=index,
                max_new_tokens=20,
                ignore_eos=True,
            )
            return result.token_ids

        alone = [await one(index) for index in range(12)]
        together = await asyncio.gather(*(one(index) for index in range(12)))
    assert together == alone


async def test_a_prompt_longer_than_a_pass_is_fed_in_chunks(
    target_folder: Path, draft_folder: Path
) -> None:
    prompt = [3 + i % 250 for i in range(200)]
    expected = reference(target_folder, prompt, 12)
    async with pair(
        target_folder,
        draft_folder,
        target_options={"max_rows": 17},
        draft_options={"max_rows": 64},
    ) as stack:
        result = await stack.generate(prompt, k=4, temperature=0.0, max_new_tokens=12)
    assert result.token_ids == expected
