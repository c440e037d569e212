"""A draft that is missing, wrong, lying, slow or dead: no client ever sees an error for it."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from specdec import services
from specdec.cli.health import check, wait_until_ready
from specdec.lm.tokenizer import token_table_sha256
from specdec.v1 import common_pb2, draft_pb2, draft_pb2_grpc, gateway_pb2, gateway_pb2_grpc
from tests.models import byte_tokens, make_model, permuted_tokens
from tests.stack import Gateway, draft, drafts_are_used, free_port, gateway, pair, verifier

PROMPT = [5, 6, 7, 8, 9]
OPTIONS: dict[str, Any] = {"k": 4, "seed": 3, "max_new_tokens": 30, "ignore_eos": True}


@pytest.mark.slow
async def test_a_draft_killed_half_way_changes_nothing_but_the_pace(
    target_folder: Path, draft_folder: Path
) -> None:
    port = free_port()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "draft_service", "--model", str(draft_folder)),
        *("--port", str(port), "--dtype", "float32", "--num-threads", "1"),
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        address = f"127.0.0.1:{port}"
        assert await wait_until_ready(services.DRAFT, address, 60) is None
        async with (
            verifier(target_folder) as (verifier_address, _),
            gateway(verifier_address, address) as running,
        ):
            await drafts_are_used(running)
            request = running.request(
                PROMPT, k=4, rule="coupled", seed=3, max_new_tokens=300, ignore_eos=True
            )
            undisturbed = await running.send(request)
            call = gateway_pb2_grpc.GenerationServiceStub(running.channel).Generate(request)
            token_ids: list[int] = []
            completion = gateway_pb2.Completion()
            async for response in call:
                token_ids += response.chunk.token_ids
                if len(token_ids) > 40 and process.returncode is None:
                    process.kill()
                    await process.wait()
                if response.HasField("completion"):
                    completion = response.completion
            assert process.returncode == -9
            assert token_ids == undisturbed.token_ids
            assert completion.speculation.num_accepted_tokens > 0
            assert completion.speculation.fallback_rounds > 0
            assert "UNAVAILABLE" in completion.speculation.fallback_reason
            again = await running.send(request)
            assert again.token_ids == undisturbed.token_ids
            assert again.speculation.num_draft_tokens == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_without_a_draft_generation_is_plain_and_says_why(target_folder: Path) -> None:
    async with pair(target_folder, None) as stack:
        result = await stack.generate(PROMPT, **OPTIONS)
        assert result.speculation.fallback_rounds == 29  # the last round never drafts
        assert result.speculation.fallback_reason == "this gateway has no draft"
    async with (
        verifier(target_folder) as (verifier_address, _),
        gateway(verifier_address, f"127.0.0.1:{free_port()}") as running,
    ):
        absent = await running.generate(PROMPT, **OPTIONS)
        assert absent.token_ids == result.token_ids
        assert absent.speculation.fallback_rounds == 29
        assert absent.speculation.fallback_reason


async def test_a_draft_with_a_permuted_token_table_is_never_used(
    target_folder: Path, tmp_path: Path
) -> None:
    permuted = permuted_tokens(300)
    draft_folder = make_model(tmp_path / "permuted", seed=1, rows=300, table=permuted)
    async with pair(target_folder, draft_folder) as stack:
        result = await stack.generate(PROMPT, **OPTIONS)
        assert stack.draft is not None
        assert stack.draft.runtime is not None
        assert stack.verifier.runtime is not None
        hashes = (
            stack.draft.runtime.info.tokenizer_sha256,
            stack.verifier.runtime.info.tokenizer_sha256,
        )
    assert hashes[0] != hashes[1]
    assert result.speculation.num_draft_tokens == 0
    assert result.speculation.fallback_rounds == 29
    for digest in hashes:
        assert digest in result.speculation.fallback_reason


@pytest.mark.slow
@pytest.mark.parametrize(("target_rows", "draft_rows"), [(512, 576), (576, 512)])
@pytest.mark.parametrize("rule", ["rejection", "block", "coupled"])
async def test_padding_rows_of_the_embedding_are_no_mismatch_and_never_emitted(
    tmp_path: Path, target_rows: int, draft_rows: int, rule: str
) -> None:
    table = byte_tokens(500)
    target = make_model(tmp_path / "target", seed=1, rows=target_rows, table=table)
    draft = make_model(tmp_path / "draft", seed=2, rows=draft_rows, table=table)
    async with pair(target, draft) as stack:
        for seed in range(4):
            result = await stack.generate(
                PROMPT,
                k=4,
                rule=rule,
                seed=seed,
                max_new_tokens=100,
                ignore_eos=True,
                temperature=5.0,
            )
            assert result.speculation.num_draft_tokens > 0
            assert max(result.token_ids) < 500


class _Liar(draft_pb2_grpc.DraftServiceServicer):
    """A draft service whose proposals are made by a function of the test."""

    def __init__(self, info: common_pb2.ModelInfo, lie: Any) -> None:
        self._info = info
        self._lie = lie
        self.is_lying = False

    async def GetModelInfo(self, request: Any, context: Any) -> Any:
        return draft_pb2.DraftServiceGetModelInfoResponse(model_info=self._info)

    async def Draft(self, request_iterator: Any, context: Any) -> AsyncIterator[Any]:
        base_length = 0
        round_number = 0
        async for request in request_iterator:
            if request.HasField("open"):
                base_length, round_number = request.open.base_length, request.open.round
                temperature = request.open.sampling.temperature
                drafted = [1, 2][: request.open.num_draft_tokens]
            else:
                base_length += len(request.advance.token_ids)
                round_number = request.advance.round
                drafted = [1, 2][: request.advance.num_draft_tokens]
            honest = draft_pb2.Proposal(
                round=round_number,
                base_length=base_length,
                token_ids=drafted,
                distributions=[
                    common_pb2.SparseDistribution(token_ids=[t], probabilities=[1.0])
                    for t in drafted
                ],
                temperature=temperature,
            )
            for proposal in await self._lie(honest, context) if self.is_lying else [honest]:
                yield draft_pb2.DraftResponse(proposal=proposal)


def _changed(**fields: Any) -> Any:
    async def lie(honest: draft_pb2.Proposal, context: Any) -> list[draft_pb2.Proposal]:
        for name, value in fields.items():
            if isinstance(value, list):
                honest.ClearField(name)
                getattr(honest, name).extend(value)
            else:
                setattr(honest, name, value)
        return [honest]

    return lie


def _q(token_ids: list[int], probabilities: list[float]) -> common_pb2.SparseDistribution:
    return common_pb2.SparseDistribution(token_ids=token_ids, probabilities=probabilities)


async def _hangs(honest: draft_pb2.Proposal, context: Any) -> list[draft_pb2.Proposal]:
    await asyncio.sleep(60)
    return [honest]


async def _out_of_memory(honest: draft_pb2.Proposal, context: Any) -> list[draft_pb2.Proposal]:
    await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "no memory left")
    return []


async def _with_stale_ones(honest: draft_pb2.Proposal, context: Any) -> list[draft_pb2.Proposal]:
    stale = draft_pb2.Proposal(round=honest.round - 1, base_length=honest.base_length - 1)
    return [stale, stale, honest]


async def _lied_to(target_folder: Path, lie: Any, use: Any, **gateway_options: Any) -> None:
    """Runs `use` with a gateway whose draft service is a liar."""
    async with verifier(target_folder) as (verifier_address, servicer):
        assert servicer.runtime is not None
        server = grpc.aio.server()
        liar = _Liar(servicer.runtime.info, lie)
        draft_pb2_grpc.add_DraftServiceServicer_to_server(liar, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            async with gateway(verifier_address, f"127.0.0.1:{port}", **gateway_options) as running:
                await drafts_are_used(running)
                liar.is_lying = True
                await use(running)
        finally:
            await server.stop(0)


async def _floods(honest: draft_pb2.Proposal, context: Any) -> list[draft_pb2.Proposal]:
    honest.round += 1000
    return [honest] * 200


async def _pushes_ahead(honest: draft_pb2.Proposal, context: Any) -> list[draft_pb2.Proposal]:
    """The proposal, and two for the next round that presume a verdict that is not given."""
    wrong = draft_pb2.Proposal()
    wrong.CopyFrom(honest)
    wrong.round += 1
    wrong.base_length += 1
    wrong.presumed_token_ids.append(299)
    longer = draft_pb2.Proposal()
    longer.CopyFrom(wrong)
    longer.base_length += 200
    return [honest, wrong, longer]


@pytest.mark.parametrize(
    ("lie", "reason"),
    [
        (_changed(token_ids=[1, 299, 300]), "outside the vocabulary of 300"),
        (_changed(token_ids=[1] * 9), "more than the limit of 4"),
        (_changed(base_length=4), "base_length"),
        (_changed(round=77), "no proposal within"),
        (_changed(temperature=0.5), "temperature 0.5"),
        (_changed(distributions=[]), "0 distributions"),
        (_changed(distributions=[_q([1], [float("nan")]), _q([2], [1.0])]), "not positive"),
        (_changed(distributions=[_q([1], [-1.0]), _q([2], [1.0])]), "not positive"),
        (_changed(distributions=[_q([1, 1], [0.5, 0.5]), _q([2], [1.0])]), "distinct"),
        (_changed(distributions=[_q([3], [1.0]), _q([2], [1.0])]), "does not hold token id 1"),
        (_changed(distributions=[_q([1, 999], [0.5, 0.5]), _q([2], [1.0])]), "outside the vocab"),
        (_hangs, "no proposal within"),
        (_floods, "too many proposals"),
        (_out_of_memory, "RESOURCE_EXHAUSTED"),
    ],
)
async def test_a_lying_draft_is_dropped_and_the_generation_goes_on(
    target_folder: Path, lie: Any, reason: str
) -> None:
    async def use(running: Gateway) -> None:
        result = await running.generate(PROMPT, rule="rejection", **OPTIONS)
        assert len(result.token_ids) == 30
        assert result.speculation.num_draft_tokens == 0
        assert reason in result.speculation.fallback_reason

    await _lied_to(target_folder, lie, use, draft_patience_seconds=0.3)


@pytest.mark.parametrize(
    ("lie", "rule", "reason"),
    [
        (_changed(token_ids=[1, 2, 3], parents=[0, 0, 0]), "coupled", "the limit is 2"),
        (_changed(token_ids=[1, 1], parents=[0, 0]), "coupled", "are equal"),
        (_changed(token_ids=[1, 2], parents=[0]), "coupled", "came with 1 parents"),
        (_changed(token_ids=[1, 2], parents=[0, 1, 1]), "coupled", "came with 3 parents"),
        (_changed(token_ids=[1, 2], parents=[2, 0]), "coupled", "does not come before it"),
        (_changed(token_ids=[1, 2], parents=[0, 2**32 - 1]), "coupled", "does not come before it"),
        (_changed(parents=[0, 0]), "rejection", "the limit is 1"),
        (_changed(parents=[0, 0]), "block", "the limit is 1"),
    ],
)
async def test_a_draft_whose_trees_are_none_is_dropped_and_the_generation_goes_on(
    target_folder: Path, lie: Any, rule: str, reason: str
) -> None:
    async def use(running: Gateway) -> None:
        plain = await running.generate(PROMPT, rule=rule, **{**OPTIONS, "k": 0})
        result = await running.generate(PROMPT, rule=rule, topk=2, **OPTIONS)
        assert result.speculation.num_draft_tokens == 0
        assert result.speculation.fallback_rounds == 29
        assert reason in result.speculation.fallback_reason
        # Without drafted tokens each rule is plain decoding.
        assert result.token_ids == plain.token_ids

    await _lied_to(target_folder, lie, use)


async def test_stale_proposals_are_dropped_and_counted(target_folder: Path) -> None:
    async def use(running: Gateway) -> None:
        result = await running.generate(PROMPT, rule="rejection", **OPTIONS)
        speculation = result.speculation
        assert speculation.fallback_rounds == 0
        assert speculation.stale_proposals == 2 * (speculation.rounds - 1)

    await _lied_to(target_folder, _with_stale_ones, use)


async def test_proposals_pushed_for_another_outcome_are_dropped_and_counted(
    target_folder: Path,
) -> None:
    async def use(running: Gateway) -> None:
        result = await running.generate(PROMPT, rule="rejection", **OPTIONS)
        speculation = result.speculation
        assert speculation.fallback_rounds == 0
        # Those of the last drafting round are for a round that never drafts.
        assert speculation.stale_proposals == 2 * (speculation.rounds - 2)

    await _lied_to(target_folder, _pushes_ahead, use)


async def test_a_proposal_pushed_for_the_outcome_that_came_is_used(target_folder: Path) -> None:
    async def pushes_right(honest: draft_pb2.Proposal, context: Any) -> list[draft_pb2.Proposal]:
        """Every round is announced one early: the target's greedy tokens are known."""
        if honest.round > 1:
            return []
        pushed = [honest]
        for ahead in range(1, 29):
            proposal = draft_pb2.Proposal()
            proposal.CopyFrom(honest)
            proposal.ClearField("token_ids")
            proposal.token_ids.append((plain[ahead] + 1) % 300)
            proposal.round += ahead
            proposal.base_length += ahead
            proposal.presumed_token_ids.extend(plain[:ahead])
            pushed.append(proposal)
        pushed[0].ClearField("token_ids")
        pushed[0].token_ids.append((plain[0] + 1) % 300)
        return pushed

    options = {**OPTIONS, "temperature": 0.0, "k": 1}
    async with pair(target_folder, None) as stack:
        plain = (await stack.generate(PROMPT, **options)).token_ids

    async def use(running: Gateway) -> None:
        result = await running.generate(PROMPT, **options)
        assert result.token_ids == plain
        assert result.speculation.fallback_rounds == 0
        assert result.speculation.num_draft_tokens == 29
        assert result.speculation.num_accepted_tokens == 0

    await _lied_to(target_folder, pushes_right, use)


async def test_a_draft_replaced_by_one_of_another_tokenizer_is_not_used(
    target_folder: Path, draft_folder: Path, tmp_path: Path
) -> None:
    table = byte_tokens(300)
    permuted = permuted_tokens(300)
    other = make_model(tmp_path / "permuted", seed=1, rows=300, table=permuted)
    port = free_port()
    async with verifier(target_folder) as (verifier_address, _):
        first = draft(draft_folder, port=port)
        address, _ = await first.__aenter__()
        async with gateway(verifier_address, address) as running:
            await drafts_are_used(running)
            await first.__aexit__(None, None, None)
            # No call was made in between, so that no call could fail.
            async with draft(other, port=port):
                for _ in range(3):
                    result = await running.generate(PROMPT, **OPTIONS)
                    assert result.speculation.num_draft_tokens == 0
                    assert result.speculation.fallback_rounds == 29
                    await asyncio.sleep(0.3)
                assert "TOKENIZER_MISMATCH" in result.speculation.fallback_reason
                assert token_table_sha256(table) in result.speculation.fallback_reason
                assert token_table_sha256(permuted) in result.speculation.fallback_reason


async def test_the_gateway_is_not_ready_once_its_verifier_is_gone(target_folder: Path) -> None:
    gone = verifier(target_folder)
    verifier_address, _ = await gone.__aenter__()
    async with gateway(verifier_address) as running:
        await running.generate(PROMPT, **OPTIONS)
        await gone.__aexit__(None, None, None)
        for _ in range(100):
            if await check(services.GATEWAY, running.address) is not None:
                break
            await asyncio.sleep(0.02)
        else:
            pytest.fail("the gateway says that it is ready without a verifier")
