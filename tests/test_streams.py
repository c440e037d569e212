"""The two internal streams, spoken directly: resuming, stale messages, gaps, contradictions."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from specdec.errors import SpecdecError, Violation, reason_of, violations_of
from specdec.lm.tokenizer import token_table_sha256
from specdec.sessions import SessionContract
from specdec.v1 import (
    common_pb2,
    draft_pb2,
    draft_pb2_grpc,
    verifier_pb2,
    verifier_pb2_grpc,
)
from tests.models import byte_tokens
from tests.stack import draft, verifier

PROMPT = [5, 6, 7, 8]
TABLE_SHA256 = token_table_sha256(byte_tokens(300))


def sampling(**fields: Any) -> common_pb2.Sampling:
    return common_pb2.Sampling(**{"top_p": 1.0, "repetition_penalty": 1.0, **fields})


def opening(committed: list[int] | None = None, **changes: Any) -> common_pb2.Open:
    committed = committed or []
    fields: dict[str, Any] = {
        "session_id": "s1",
        "round": 1,
        "base_length": len(PROMPT) + len(committed),
        "prompt_token_ids": PROMPT,
        "committed_token_ids": committed,
        "sampling": sampling(temperature=0.8, seed=4),
        "acceptance_rule": common_pb2.ACCEPTANCE_RULE_COUPLED,
        "num_draft_tokens": 3,
        "tokenizer_sha256": TABLE_SHA256,
    }
    return common_pb2.Open(**{**fields, **changes})


class VerifyClient:
    """Speaks the Verify stream."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._call = verifier_pb2_grpc.VerifierServiceStub(channel).Verify()

    async def open(self, message: common_pb2.Open) -> common_pb2.Opened:
        await self._call.write(verifier_pb2.VerifyRequest(open=message))
        return (await self._read()).opened

    async def send(self, **fields: Any) -> None:
        candidates = verifier_pb2.Candidates(**fields)
        await self._call.write(verifier_pb2.VerifyRequest(candidates=candidates))

    async def verdict(self, **fields: Any) -> verifier_pb2.Verdict:
        await self.send(**fields)
        return (await self._read()).verdict

    async def end(self) -> None:
        await self._call.done_writing()
        assert await self._call.read() is grpc.aio.EOF

    async def _read(self) -> verifier_pb2.VerifyResponse:
        response = await self._call.read()
        assert isinstance(response, verifier_pb2.VerifyResponse)
        return response


class DraftClient:
    """Speaks the Draft stream."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._call = draft_pb2_grpc.DraftServiceStub(channel).Draft()

    async def open(self, message: common_pb2.Open) -> draft_pb2.Proposal:
        await self._call.write(draft_pb2.DraftRequest(open=message))
        assert (await self._read()).opened.base_length == message.base_length
        return (await self._read()).proposal

    async def send(self, **fields: Any) -> None:
        await self._call.write(draft_pb2.DraftRequest(advance=draft_pb2.Advance(**fields)))

    async def advance(self, **fields: Any) -> draft_pb2.Proposal:
        await self.send(**fields)
        return (await self._read()).proposal

    async def end(self) -> None:
        await self._call.done_writing()
        assert await self._call.read() is grpc.aio.EOF

    async def _read(self) -> draft_pb2.DraftResponse:
        response = await self._call.read()
        assert isinstance(response, draft_pb2.DraftResponse)
        return response


@asynccontextmanager
async def verifying(folder: Path) -> AsyncIterator[grpc.aio.Channel]:
    async with (
        verifier(folder, max_num_draft_tokens=8) as (address, _),
        grpc.aio.insecure_channel(address) as channel,
    ):
        yield channel


@asynccontextmanager
async def drafting(folder: Path) -> AsyncIterator[grpc.aio.Channel]:
    async with (
        draft(folder, max_num_draft_tokens=8) as (address, _),
        grpc.aio.insecure_channel(address) as channel,
    ):
        yield channel


async def plain(client: VerifyClient, base_length: int, rounds: range) -> list[int]:
    """Decodes without drafted tokens."""
    tokens: list[int] = []
    for number in rounds:
        verdict = await client.verdict(round=number, base_length=base_length + len(tokens))
        assert verdict.num_accepted == 0
        tokens += verdict.token_ids
    return tokens


async def test_a_verifier_session_resumes_on_a_fresh_stream(target_folder: Path) -> None:
    async with verifying(target_folder) as channel:
        whole = VerifyClient(channel)
        await whole.open(opening())
        tokens = await plain(whole, 4, range(1, 13))
        for done in (1, 5, 11):
            resumed = VerifyClient(channel)
            opened = await resumed.open(opening(tokens[:done], round=done + 1))
            assert (opened.round, opened.base_length) == (done + 1, 4 + done)
            assert await plain(resumed, 4 + done, range(done + 1, 13)) == tokens[done:]


async def test_a_draft_session_resumes_on_a_fresh_stream(draft_folder: Path) -> None:
    async with drafting(draft_folder) as channel:
        whole = DraftClient(channel)
        await whole.open(opening())
        expected = await whole.advance(
            round=2, base_length=4, token_ids=[9, 10], num_draft_tokens=3
        )
        resumed = await DraftClient(channel).open(opening([9, 10], round=2))
        assert resumed.token_ids == expected.token_ids
        assert len(resumed.token_ids) == 3
        assert (resumed.round, resumed.base_length) == (2, 6)


async def test_drafting_does_not_depend_on_what_was_drafted_before(draft_folder: Path) -> None:
    """Rolled back after 0, some or all accepted: the draft is that of a fresh session."""
    async with drafting(draft_folder) as channel:
        first = list((await DraftClient(channel).open(opening())).token_ids)
        for accepted in range(4):
            committed = [*first[:accepted], 42]
            client = DraftClient(channel)
            await client.open(opening())
            after = await client.advance(
                round=2, base_length=4, token_ids=committed, num_draft_tokens=3
            )
            fresh = await DraftClient(channel).open(opening(committed, round=2))
            assert after.token_ids == fresh.token_ids


async def test_no_more_is_drafted_than_was_asked_for(draft_folder: Path) -> None:
    async with drafting(draft_folder) as channel:
        client = DraftClient(channel)
        assert len((await client.open(opening(num_draft_tokens=5))).token_ids) == 5
        base_length = 4
        for number, k in enumerate((2, 0, 5, 1), start=2):
            proposal = await client.advance(
                round=number, base_length=base_length, token_ids=[9], num_draft_tokens=k
            )
            base_length += 1
            assert len(proposal.token_ids) == k
            assert (proposal.round, proposal.base_length) == (number, base_length)


@pytest.mark.parametrize("rule", common_pb2.AcceptanceRule.values()[1:])
async def test_only_sparse_numbers_cross_the_wire(draft_folder: Path, rule: Any) -> None:
    async with drafting(draft_folder) as channel:
        sampled = await DraftClient(channel).open(opening(acceptance_rule=rule))
        greedy = await DraftClient(channel).open(opening(acceptance_rule=rule, sampling=sampling()))
    if rule == common_pb2.ACCEPTANCE_RULE_COUPLED:
        assert not sampled.distributions
    else:
        assert len(sampled.distributions) == 3
        for token_id, q in zip(sampled.token_ids, sampled.distributions, strict=True):
            assert token_id in q.token_ids
            assert len(q.token_ids) <= 64
            assert sum(q.probabilities) == pytest.approx(1.0, abs=1e-6)
    assert not greedy.distributions
    assert sampled.temperature == 0.8
    assert greedy.temperature == 0.0


async def test_stale_messages_are_dropped_and_the_session_goes_on(
    target_folder: Path, draft_folder: Path
) -> None:
    async with verifying(target_folder) as channel:
        client = VerifyClient(channel)
        await client.open(opening())
        tokens = await plain(client, 4, range(1, 4))
        await client.send(round=1, base_length=4)
        await client.send(round=3, base_length=99)
        tokens += await plain(client, 7, range(4, 6))
        again = VerifyClient(channel)
        await again.open(opening())
        assert await plain(again, 4, range(1, 6)) == tokens
        await again.end()
    async with drafting(draft_folder) as channel:
        drafter = DraftClient(channel)
        first = await drafter.open(opening())
        await drafter.send(round=1, base_length=4, token_ids=[9], num_draft_tokens=3)
        second = await drafter.advance(round=2, base_length=4, token_ids=[9], num_draft_tokens=3)
        assert (first.round, second.round, second.base_length) == (1, 2, 5)


async def test_rounds_may_be_skipped(target_folder: Path) -> None:
    async with verifying(target_folder) as channel:
        client = VerifyClient(channel)
        await client.open(opening())
        verdict = await client.verdict(round=10, base_length=4)
        assert (verdict.round, verdict.base_length, len(verdict.token_ids)) == (10, 4, 1)


@pytest.mark.parametrize(
    "contradiction",
    [
        {"round": 1, "base_length": 5},
        {"round": 1, "base_length": 3},
        {"round": 1, "base_length": 4, "token_ids": [300]},
        {"round": 1, "base_length": 4, "token_ids": [1] * 9},
    ],
)
async def test_a_contradiction_fails_that_session_and_no_other(
    target_folder: Path, draft_folder: Path, contradiction: dict[str, Any]
) -> None:
    async with verifying(target_folder) as channel:
        neighbour, client = VerifyClient(channel), VerifyClient(channel)
        await neighbour.open(opening())
        await client.open(opening(num_draft_tokens=8))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await client.verdict(**contradiction)
        assert caught.value.code() == grpc.StatusCode.FAILED_PRECONDITION
        assert reason_of(caught.value) == "CONTRACT_VIOLATION"
        assert "s1" in (caught.value.details() or "")
        assert len(await plain(neighbour, 4, range(1, 4))) == 3
    async with drafting(draft_folder) as channel:
        bystander, drafter = DraftClient(channel), DraftClient(channel)
        await bystander.open(opening())
        await drafter.open(opening(num_draft_tokens=8))
        fields = {**contradiction, "round": 2}
        if len(fields.get("token_ids", ())) == 9:
            fields = {"round": 2, "base_length": 4, "num_draft_tokens": 9}
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await drafter.advance(**fields)
        assert reason_of(caught.value) == "CONTRACT_VIOLATION"
        await bystander.advance(round=2, base_length=4, token_ids=[7], num_draft_tokens=2)


GREEDY = sampling(temperature=0.0)


@pytest.mark.parametrize(
    ("parents", "token_ids", "changes"),
    [
        pytest.param([0, 0], [1, 2], {}, id="without topk"),
        pytest.param([0, 0, 0], [1, 2, 3], {"draft_topk": 2}, id="too many side by side"),
        pytest.param([0, 0], [1, 1], {"draft_topk": 2}, id="equal ones"),
        pytest.param([0], [1, 2], {"draft_topk": 2}, id="too few"),
        pytest.param([0, 1, 1], [1, 2], {"draft_topk": 2}, id="too many"),
        pytest.param([0, 3, 0], [1, 2, 3], {"draft_topk": 2}, id="after its child"),
        pytest.param([1], [1], {"draft_topk": 2}, id="its own parent"),
        pytest.param([0, 2**32 - 1], [1, 2], {"draft_topk": 2}, id="far away"),
        pytest.param(
            [0, 0],
            [1, 2],
            {"draft_topk": 2, "acceptance_rule": common_pb2.ACCEPTANCE_RULE_REJECTION},
            id="with distributions",
        ),
    ],
)
async def test_a_tree_that_is_none_or_not_wanted_fails_that_session_and_no_other(
    target_folder: Path, parents: list[int], token_ids: list[int], changes: dict[str, Any]
) -> None:
    q = [common_pb2.SparseDistribution(token_ids=[t], probabilities=[1.0]) for t in token_ids]
    async with verifying(target_folder) as channel:
        neighbour, client = VerifyClient(channel), VerifyClient(channel)
        await neighbour.open(opening(draft_topk=2, sampling=GREEDY))
        await client.open(opening(num_draft_tokens=8, **changes))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await client.verdict(
                round=1, base_length=4, token_ids=token_ids, parents=parents, distributions=q
            )
        assert caught.value.code() == grpc.StatusCode.FAILED_PRECONDITION
        assert reason_of(caught.value) == "CONTRACT_VIOLATION"
        # A tree of two tokens side by side, one of which is right.
        first, *rest = await plain(neighbour, 4, range(1, 4))
        other = VerifyClient(channel)
        await other.open(opening(draft_topk=2, sampling=GREEDY))
        verdict = await other.verdict(
            round=1, base_length=4, token_ids=[(first + 1) % 300, first], parents=[0, 0]
        )
        assert verdict.num_accepted == 1
        assert list(verdict.token_ids) == [first, rest[0]]
        assert await plain(other, 6, range(2, 3)) == rest[1:]


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("base_length", {"base_length": 5}),
        ("session_id", {"session_id": ""}),
        ("prompt_token_ids", {"prompt_token_ids": [], "base_length": 0}),
        ("prompt_token_ids", {"prompt_token_ids": [5, 6, 7, 300]}),
        ("prompt_token_ids", {"prompt_token_ids": [5] * 512, "base_length": 512}),
        ("committed_token_ids", {"committed_token_ids": [999], "base_length": 5}),
        ("acceptance_rule", {"acceptance_rule": 0}),
        ("acceptance_rule", {"acceptance_rule": 44}),
        ("num_draft_tokens", {"num_draft_tokens": 9}),
        ("temperature", {"sampling": sampling(temperature=-1.0)}),
        ("temperature", {"sampling": sampling(temperature=float("nan"))}),
        ("top_p", {"sampling": sampling(top_p=0.0)}),
        ("repetition_penalty", {"sampling": sampling(repetition_penalty=0.0)}),
        ("presence_penalty", {"sampling": sampling(presence_penalty=2.5)}),
        ("logit_bias", {"sampling": sampling(logit_bias={300: 1.0})}),
        ("suppressed_token_ids", {"sampling": sampling(suppressed_token_ids=[300])}),
    ],
)
async def test_a_bad_open_is_refused_by_the_name_of_its_field(
    target_folder: Path, field: str, changes: dict[str, Any]
) -> None:
    async with verifying(target_folder) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await VerifyClient(channel).open(opening(**changes))
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert field in (caught.value.details() or "")


async def test_the_first_message_must_be_an_open(target_folder: Path, draft_folder: Path) -> None:
    async with verifying(target_folder) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await VerifyClient(channel).verdict(round=1, base_length=4)
        assert reason_of(caught.value) == "CONTRACT_VIOLATION"
    async with drafting(draft_folder) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await DraftClient(channel).advance(round=1, base_length=4)
        assert reason_of(caught.value) == "CONTRACT_VIOLATION"


async def test_a_session_is_opened_only_once(target_folder: Path) -> None:
    async with verifying(target_folder) as channel:
        client = VerifyClient(channel)
        await client.open(opening())
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await client.open(opening())
        assert reason_of(caught.value) == "CONTRACT_VIOLATION"


async def test_a_session_of_another_token_table_is_refused_with_both_hashes(
    target_folder: Path, draft_folder: Path
) -> None:
    other = "0" * 64
    async with verifying(target_folder) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as verifier_error:
            await VerifyClient(channel).open(opening(tokenizer_sha256=other))
    async with drafting(draft_folder) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as draft_error:
            await DraftClient(channel).open(opening(tokenizer_sha256=other))
    for caught in (verifier_error, draft_error):
        assert reason_of(caught.value) == "TOKENIZER_MISMATCH"
        assert TABLE_SHA256 in (caught.value.details() or "")
        assert other in (caught.value.details() or "")


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"round": 2**64 - 1}, "open.round"),
        ({"logprobs": common_pb2.LogprobsRequest(num_top=21)}, "open.logprobs.num_top"),
        ({"logprobs": common_pb2.LogprobsRequest(mode=9)}, "open.logprobs.mode"),  # type: ignore[arg-type]
        ({"sampling": sampling(stop_token_ids=[300])}, "open.sampling.stop_token_ids"),
        ({"sampling": sampling(allowed_token_ids=[5], suppressed_token_ids=[5])}, "open.sampling"),
        (
            {"sampling": sampling(grammar={"regex": "a*"}, allowed_token_ids=[5])},
            "open.sampling.grammar",
        ),
    ],
)
def test_an_open_that_could_only_fail_later_is_refused_at_once(
    changes: dict[str, Any], field: str
) -> None:
    info = common_pb2.ModelInfo(
        tokenizer_sha256=TABLE_SHA256,
        effective_vocab_size=300,
        max_context_length=512,
        max_num_draft_tokens=32,
        acceptance_rules=[common_pb2.ACCEPTANCE_RULE_COUPLED],
    )
    with pytest.raises(SpecdecError) as caught:
        SessionContract(opening(**changes), info)
    assert [violation.field for violation in caught.value.violations] == [field]


async def test_what_cannot_be_parsed_is_refused_by_its_name(target_folder: Path) -> None:
    # An Open whose session_id is not UTF-8.
    garbled = b"\x0a\x04\x0a\x02\xff\xfe"
    async with (
        verifier(target_folder) as (address, _),
        grpc.aio.insecure_channel(address) as channel,
    ):
        path = "/specdec.v1.VerifierService/"
        stream: Any = channel.stream_stream(path + "Verify")()
        await stream.write(garbled)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stream.read()
        assert [v.field for v in violations_of(caught.value)] == ["open.session_id"]
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary(path + "GetModelInfo")(b"\xff\xff")
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert reason_of(caught.value) == "INVALID_REQUEST"


def test_a_status_stays_within_what_grpc_lets_through() -> None:
    found = [Violation(f"field[{n}]", "é" * 300) for n in range(500)]
    status = SpecdecError.invalid(found).to_status()
    assert 3 * len(status.message.encode()) + 4 * status.ByteSize() / 3 < 8192
    assert len(status.details) == 2
