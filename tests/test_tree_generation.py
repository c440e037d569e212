"""Trees, drafts that run ahead and drafts that are cut short: what is generated stays the same.

Through the real services, with tiny models in float32. A mediocre draft and a good one.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import grpc
import pytest
import pytest_asyncio

import verifier_service.verification
from draft_service.drafter import Draft
from draft_service.model_drafter import ModelDraftSession
from draft_service.rounds import Rounds
from draft_service.tree import Node, Tree
from gateway.controller import Controller, DraftPlan
from gateway.draft_stream import DraftStream
from gateway.verify_stream import VerifyStream
from specdec.drafting import DraftRounds
from specdec.lm.sequence import CachedSequence
from specdec.trees import depths, parents_of, walk
from specdec.v1 import common_pb2, draft_pb2, draft_pb2_grpc, gateway_pb2, verifier_pb2
from tests.models import make_model
from tests.stack import Result, Stack, draft, free_port, gateway, pair, verifier
from tests.test_streams import DraftClient, opening, sampling
from verifier_service import acceptance

pytestmark = pytest.mark.usefixtures("forgiving")

PROMPT = list(range(5, 40))
LENGTH = 40
PATIENT: dict[str, Any] = {"draft_patience_seconds": 60.0}
"""A proposal that comes late counts as one that does not come: not so on a busy machine."""
TEMPERATURES = pytest.mark.parametrize("temperature", [0.0, 0.9])


class Way(NamedTuple):
    """How to speculate."""

    k: int
    topk: int = 1
    run_ahead: int = 0
    adaptive: bool = False


FEW_WAYS = [Way(5, run_ahead=8), Way(12, topk=4, run_ahead=4)]
WAYS = [
    Way(5, run_ahead=8),
    Way(8, topk=2),
    Way(1, topk=2, run_ahead=4),
    Way(8, topk=4, run_ahead=4, adaptive=True),
    Way(16, topk=4, run_ahead=8),
    Way(16, run_ahead=4, adaptive=True),
]


@pytest.fixture(scope="module")
def good_folder(tmp_path_factory: pytest.TempPathFactory, target_folder: Path) -> Path:
    """A draft whose first token stands more often than not."""
    folder = tmp_path_factory.mktemp("good") / "model"
    return make_model(folder, seed=2, rows=300, near=target_folder, noise=0.02)


@pytest_asyncio.fixture(scope="module")
async def mediocre(target_folder: Path, draft_folder: Path) -> AsyncIterator[Stack]:
    async with pair(target_folder, draft_folder, **PATIENT) as stack:
        yield stack


@pytest_asyncio.fixture(scope="module")
async def good(target_folder: Path, good_folder: Path) -> AsyncIterator[Stack]:
    async with pair(target_folder, good_folder, **PATIENT) as stack:
        yield stack


def request_of(stack: Stack, way: Way, **options: Any) -> gateway_pb2.GenerateRequest:
    defaults = {"seed": 3, "rule": "coupled", "max_new_tokens": LENGTH, "ignore_eos": True}
    prompt = options.pop("prompt", PROMPT)
    if "grammar" in options:
        del defaults["ignore_eos"]
    return stack.gateway.request(prompt, **{**defaults, **way._asdict(), **options})


async def generate(stack: Stack, way: Way, **options: Any) -> Result:
    return await stack.gateway.send(request_of(stack, way, **options))


def assert_equal(found: list[Result], expected: list[Result], case: object = None) -> None:
    """That clients were given the same."""
    for one, other in zip(found, expected, strict=True):
        assert one.token_ids == other.token_ids, case
        assert one.text == other.text
        assert one.completion.finish_reason == other.completion.finish_reason
        assert one.completion.usage.completion_tokens == len(one.token_ids)
        assert len(one.logprobs) == len(other.logprobs)
        for ours, theirs in zip(one.logprobs, other.logprobs, strict=True):
            assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)
            assert ours.top_token_ids == theirs.top_token_ids
            assert list(ours.top_logprobs) == pytest.approx(list(theirs.top_logprobs), abs=1e-4)


async def assert_identical(stack: Stack, ways: list[Way], **options: Any) -> list[Result]:
    """Asserts that no way to speculate changes anything. Returns what they gave, by sample."""
    plain = await stack.gateway.send_for_samples(request_of(stack, Way(0), **options))
    found = []
    for way in ways:
        results = await stack.gateway.send_for_samples(request_of(stack, way, **options))
        assert_equal(results, plain, way)
        for result in results:
            assert result.speculation.fallback_reason in ("", "the draft proposed nothing"), way
        found += results
    return found


OBJECT = '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}'
FEATURES: dict[str, dict[str, Any]] = {
    "nothing": {},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.6, "frequency_penalty": 0.4},
    "biases": {"logit_bias": {20: 3.0, 85: -100.0, 113: 4.0}},
    "filters": {"top_k": 30, "top_p": 0.95, "min_p": 0.02},
    "masks": {"allowed_token_ids": range(30, 120), "suppressed_token_ids": [40, 41, 42]},
    "a minimum": {"min_new_tokens": 12, "logit_bias": {0: 6.0}, "ignore_eos": False},
    "stop tokens": {"stop_token_ids": range(40, 70)},
    "a regex": {"grammar": common_pb2.Grammar(regex="[I-N]{3,30}")},
    "a schema": {"grammar": common_pb2.Grammar(json_schema=OBJECT)},
    "samples": {"n": 2},
    "logprobs": {"logprobs": gateway_pb2.LogprobsParams(num_top=3), "presence_penalty": 0.5},
    "processed logprobs": {
        "logprobs": gateway_pb2.LogprobsParams(num_top=3, mode=common_pb2.LOGPROBS_MODE_PROCESSED),
        "top_k": 20,
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("feature", FEATURES)
async def test_nothing_changes_what_is_generated(mediocre: Stack, feature: str) -> None:
    for temperature in (0.0, 0.9):
        options = {"temperature": temperature, "max_new_tokens": 24, **FEATURES[feature]}
        results = await assert_identical(mediocre, FEW_WAYS, **options)
        assert sum(result.speculation.num_accepted_tokens for result in results) > 0


@pytest.mark.slow
@TEMPERATURES
@pytest.mark.parametrize("feature", FEATURES)
async def test_no_way_to_speculate_changes_what_is_generated(
    mediocre: Stack, good: Stack, feature: str, temperature: float
) -> None:
    for seed, stack in enumerate((mediocre, good)):
        options = {"temperature": temperature, "seed": seed, "prompt": [seed + 1, *PROMPT]}
        await assert_identical(stack, WAYS, **options, **FEATURES[feature])


@TEMPERATURES
async def test_stop_strings_end_a_block_where_they_end_plain_decoding(
    mediocre: Stack, temperature: float
) -> None:
    plain = await generate(mediocre, Way(0), temperature=temperature)
    letters = [text for text in plain.token_texts if text.isascii() and text.strip()]
    for place in (1, len(letters) // 2, -1):
        options = {"stop_strings": [letters[place]], "temperature": temperature}
        for result in await assert_identical(mediocre, FEW_WAYS, **options):
            assert result.completion.matched_string == letters[place]


@pytest.mark.slow
@TEMPERATURES
@pytest.mark.parametrize("topk", [1, 2, 4])
@pytest.mark.parametrize("feature", ["nothing", "penalties"])
async def test_no_number_of_drafted_tokens_changes_what_is_generated(
    mediocre: Stack, feature: str, topk: int, temperature: float
) -> None:
    ways = [
        Way(k, topk, run_ahead, adaptive)
        for k, run_ahead, adaptive in product((1, 2, 3, 5, 8, 12, 16), (0, 8), (False, True))
    ]
    options = {"temperature": temperature, "seed": 3, **FEATURES[feature]}
    await assert_identical(mediocre, ways, **options)


# Where a generation ends.


@TEMPERATURES
async def test_nothing_is_committed_past_the_limit(mediocre: Stack, temperature: float) -> None:
    ways = [Way(16, topk=4), Way(16, topk=4, run_ahead=8), Way(4, run_ahead=4)]
    for limit in range(1, 7):
        options = {"temperature": temperature, "max_new_tokens": limit}
        for result in await assert_identical(mediocre, ways, **options):
            speculation = result.speculation
            assert len(result.token_ids) == limit
            # No round had to be cut: what was verified is what was given.
            assert speculation.rounds + speculation.num_accepted_tokens == limit
            assert len(speculation.drafted_per_position) < limit


@pytest.fixture(scope="module")
def short_models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target and a draft with contexts of 64 tokens."""
    folder = tmp_path_factory.mktemp("short")
    target = make_model(folder / "target", seed=1, rows=300, context=64)
    near = make_model(folder / "draft", seed=2, rows=300, context=64, near=target, noise=0.05)
    return target, near


class Fed:
    """How long the draft's sequences get, drafted tokens included."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.longest = 0
        feed = Tree.feed

        def spied(tree: Tree, nodes: list[Node]) -> None:
            feed(tree, nodes)
            self.longest = max(self.longest, tree.base_length + tree.num_fed)

        patch.setattr(Tree, "feed", spied)


@TEMPERATURES
async def test_a_context_is_generated_to_its_end(
    short_models: tuple[Path, Path], temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No branch, and nothing that runs ahead, takes the draft past what its cache holds."""
    fed = Fed(monkeypatch)
    # As much memory as one context takes: 4 pages of 4096 bytes.
    options = {"kv_memory": 4 * 4096}
    async with pair(
        *short_models, target_options=options, draft_options=options, **PATIENT
    ) as stack:
        ways = [Way(16, topk=4), Way(16, topk=4, run_ahead=8), Way(5, run_ahead=8)]
        for prompt in (PROMPT, list(range(5, 66)), list(range(5, 68))):
            given = {"prompt": prompt, "temperature": temperature, "max_new_tokens": 100}
            for result in await assert_identical(stack, ways, **given):
                assert len(prompt) + len(result.token_ids) == 64
                assert result.completion.finish_reason == gateway_pb2.FINISH_REASON_LENGTH
    assert 60 < fed.longest <= 64


async def test_a_draft_that_did_not_heed_its_room_would_be_noticed(
    short_models: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A planted bug: it waits for pages that there are not, until it is given up."""
    monkeypatch.setattr(Tree, "fitting", lambda tree, nodes: list(nodes))
    options = {"kv_memory": 4 * 4096}
    async with pair(*short_models, draft_options=options, draft_patience_seconds=0.3) as stack:
        given = {"prompt": list(range(5, 55)), "temperature": 0.0, "max_new_tokens": 100}
        with pytest.raises(AssertionError):
            await assert_identical(stack, [Way(12, topk=4), Way(12, topk=4, run_ahead=8)], **given)


# Other services.


@pytest.mark.parametrize("service", ["target", "draft"])
async def test_where_a_service_is_deterministic_chains_are_sent(
    target_folder: Path, draft_folder: Path, service: str
) -> None:
    options: dict[str, Any] = {f"{service}_options": {"deterministic": True}, **PATIENT}
    async with pair(target_folder, draft_folder, **options) as stack:
        for temperature in (0.0, 0.9):
            options = {"temperature": temperature, "max_new_tokens": 16}
            for result in await assert_identical(stack, FEW_WAYS, **options):
                assert_chains(result)
                assert result.speculation.fallback_rounds == 0


def assert_chains(result: Result) -> None:
    """That all proposals were chains."""
    speculation = result.speculation
    assert sum(speculation.drafted_per_position) == speculation.num_draft_tokens


async def test_little_memory_changes_nothing(target_folder: Path, draft_folder: Path) -> None:
    """Sessions take each other's pages in the middle of trees, and are fed again."""
    options = {"kv_memory": 14 * 4096, "max_rows": 32}
    async with pair(
        target_folder, draft_folder, target_options=options, draft_options=options, **PATIENT
    ) as stack:
        given = [
            {"prompt": [seed, *range(3, 40 + seed)], "seed": seed, "temperature": temperature}
            for seed, temperature in zip(range(1, 7), [0.0, 0.9] * 3, strict=True)
        ]
        plain = [await generate(stack, Way(0), **each) for each in given]
        for way in (Way(12, topk=4, run_ahead=4), Way(8, topk=3)):
            found = await asyncio.gather(*(generate(stack, way, **each) for each in given))
            assert_equal(found, plain, way)
            assert sum(result.speculation.num_accepted_tokens for result in found) > 0
        assert stack.draft is not None
        for runtime in (stack.verifier.runtime, stack.draft.runtime):
            assert runtime is not None
            assert runtime.scheduler.residents.num_preemptions > 0
            await runtime.thread.run(runtime.scheduler.residents.check_integrity)


@TEMPERATURES
async def test_copies_and_a_model_together_change_nothing(
    target_folder: Path, good_folder: Path, temperature: float
) -> None:
    options = {"drafters": ["lookup", "model"], "min_match": 3}
    async with pair(target_folder, good_folder, draft_options=options, **PATIENT) as stack:
        for prompt in ([*range(5, 20)] * 3, PROMPT):
            results = await assert_identical(
                stack,
                FEW_WAYS,
                prompt=prompt,
                temperature=temperature,
                logit_bias={20: 4.0, 21: 4.0},
            )
            assert sum(result.speculation.num_accepted_tokens for result in results) > 0


# What it is good for.


async def means(stack: Stack, way: Way, seeds: range, **options: Any) -> tuple[float, float]:
    """How many tokens a round committed, and how many it drafted."""
    rounds = accepted = drafted = 0
    for seed in seeds:
        result = await generate(stack, way, prompt=[seed, *PROMPT], seed=seed, **options)
        rounds += result.speculation.rounds
        accepted += result.speculation.num_accepted_tokens
        drafted += result.speculation.num_draft_tokens
    return 1 + accepted / rounds, drafted / rounds


@TEMPERATURES
async def test_a_tree_of_as_many_tokens_yields_more_than_a_chain(
    mediocre: Stack, temperature: float
) -> None:
    of_a_chain, rows = await means(mediocre, Way(8), range(1, 6), temperature=temperature)
    of_a_tree, same = await means(mediocre, Way(8, topk=4), range(1, 6), temperature=temperature)
    assert same == pytest.approx(rows, rel=0.06)  # near the limit both have fewer
    assert of_a_tree > of_a_chain + 0.2, (of_a_chain, of_a_tree)


@contextmanager
def patience() -> Iterator[None]:
    """Has the target wait, in one generation at a time, until the draft has run ahead."""
    asked = ran = 0
    ready = asyncio.Event()
    ahead, verdict = Rounds.ahead, VerifyStream.verdict
    opened, advanced, closed = DraftStream.open, DraftStream.advance, DraftStream.close

    async def counted_ahead(rounds: Rounds, advance: Any) -> Any:
        nonlocal ran
        found = await ahead(rounds, advance)
        ran += 1
        if ran >= asked:
            ready.set()
        return found

    async def counted_open(stream: DraftStream) -> None:
        nonlocal asked, ran
        asked, ran = 1, 0
        ready.clear()
        await opened(stream)

    async def counted_advance(stream: DraftStream, *arguments: Any) -> None:
        nonlocal asked
        asked += 1
        ready.clear()
        await advanced(stream, *arguments)

    def counted_close(stream: DraftStream) -> None:
        ready.set()
        closed(stream)

    async def patient(stream: VerifyStream, proposal: Any) -> Any:
        if asked:
            await ready.wait()
        return await verdict(stream, proposal)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Rounds, "ahead", counted_ahead)
        patch.setattr(DraftStream, "open", counted_open)
        patch.setattr(DraftStream, "advance", counted_advance)
        patch.setattr(DraftStream, "close", counted_close)
        patch.setattr(VerifyStream, "verdict", patient)
        yield


@TEMPERATURES
@pytest.mark.parametrize("topk", [1, 3])
async def test_a_good_draft_is_often_ahead(good: Stack, topk: int, temperature: float) -> None:
    hits = misses = rounds = 0
    for seed in range(1, 4):
        options = {"prompt": [seed, *PROMPT], "seed": seed, "temperature": temperature}
        plain = await generate(good, Way(0), **options)
        with patience():
            found = await generate(good, Way(4, topk, run_ahead=8), **options)
        assert_equal([found], [plain])
        hits += found.speculation.run_ahead_hits
        misses += found.speculation.run_ahead_misses
        # All but the first, and the last if it is not drafted for.
        rounds += sum(origin != gateway_pb2.TOKEN_ORIGIN_ACCEPTED for origin in found.origins) - 1
        rounds -= found.origins[-1] == gateway_pb2.TOKEN_ORIGIN_PLAIN
    assert hits + misses == rounds
    assert hits > rounds / 2, (hits, rounds)


# What is pushed ahead.


class Pushing:
    """A session at a draft service, and what it pushes."""

    def __init__(self, channel: grpc.aio.Channel, **fields: Any) -> None:
        self._call = draft_pb2_grpc.DraftServiceStub(channel).Draft()
        self._opening = opening(**fields)
        self._round, self._base_length = 1, self._opening.base_length

    async def open(self) -> draft_pb2.Proposal:
        await self._call.write(draft_pb2.DraftRequest(open=self._opening))
        assert (await self._response()).opened.base_length == self._base_length
        return await self.read()

    async def read(self) -> draft_pb2.Proposal:
        return (await self._response()).proposal

    async def _response(self) -> draft_pb2.DraftResponse:
        response = await self._call.read()
        assert isinstance(response, draft_pb2.DraftResponse)
        return response

    async def advance(self, token_ids: list[int], num_draft_tokens: int) -> None:
        self._round += 1
        advance = draft_pb2.Advance(
            round=self._round,
            base_length=self._base_length,
            token_ids=token_ids,
            num_draft_tokens=num_draft_tokens,
        )
        self._base_length += len(token_ids)
        await self._call.write(draft_pb2.DraftRequest(advance=advance))

    def close(self) -> None:
        self._call.cancel()


def parents(proposal: draft_pb2.Proposal) -> list[int]:
    return parents_of(list(proposal.parents), len(proposal.token_ids))


def drafted(proposal: draft_pb2.Proposal) -> tuple[list[int], list[int]]:
    return list(proposal.token_ids), parents(proposal)


@TEMPERATURES
@pytest.mark.parametrize("topk", [1, 3])
async def test_what_is_pushed_is_what_would_have_been_proposed(
    draft_folder: Path, topk: int, temperature: float
) -> None:
    """Round for round along verdicts that were guessed, then along one that was not."""
    settings = sampling(temperature=temperature, seed=4, presence_penalty=0.3)
    fields: dict[str, Any] = {"sampling": settings, "num_draft_tokens": 5, "draft_topk": topk}
    async with (
        draft(draft_folder) as (address, _),
        grpc.aio.insecure_channel(address) as channel,
    ):

        async def fresh(committed: list[int], num_draft_tokens: int) -> draft_pb2.Proposal:
            return await DraftClient(channel).open(
                opening(committed, **{**fields, "num_draft_tokens": num_draft_tokens})
            )

        session = Pushing(channel, run_ahead=4, **fields)
        assert drafted(await session.open()) == drafted(await fresh([], 5))
        committed: list[int] = []
        for round_number in range(2, 6):
            pushed = [await session.read() for _ in range(4)]
            presumed = [list(each.presumed_token_ids) for each in pushed]
            assert len({tuple(each) for each in presumed}) == 4
            for each, tokens in zip(pushed, presumed, strict=True):
                assert each.round == round_number
                assert each.base_length == 4 + len(committed) + len(tokens)
                assert drafted(each) == drafted(await fresh(committed + tokens, 5))
            # It is not sent again.
            chosen = presumed[round_number % 4]
            await session.advance(chosen, 5)
            committed += chosen
        pushed = [await session.read() for _ in range(4)]
        unexpected = [
            next(t for t in range(300) if [t] not in [list(e.presumed_token_ids) for e in pushed])
        ]
        await session.advance(unexpected, 3)
        late = await session.read()
        assert (late.round, list(late.presumed_token_ids)) == (6, [])
        assert drafted(late) == drafted(await fresh(committed + unexpected, 3))
        session.close()


async def test_what_was_pushed_is_cut_to_what_is_asked_for(draft_folder: Path) -> None:
    """And what follows it is made for that."""
    fields: dict[str, Any] = {
        "sampling": sampling(temperature=0.0),
        "num_draft_tokens": 6,
        "draft_topk": 3,
    }
    async with (
        draft(draft_folder) as (address, _),
        grpc.aio.insecure_channel(address) as channel,
    ):
        session = Pushing(channel, run_ahead=2, **fields)
        await session.open()
        first, _ = await session.read(), await session.read()
        tokens = list(first.presumed_token_ids)
        await session.advance(tokens, 2)
        for each in [await session.read() for _ in range(2)]:
            assert len(each.token_ids) <= 2
            presumed = list(each.presumed_token_ids)
            # Whatever stands of the two tokens that are verified, and one more.
            parents = parents_of(list(first.parents)[:2], 2)
            stands = walk(parents, list(first.token_ids)[:2], presumed)
            assert len(stands) == len(presumed) - 1
            expected = await DraftClient(channel).open(
                opening(tokens + presumed, **{**fields, "num_draft_tokens": 2})
            )
            assert drafted(each) == drafted(expected)
        session.close()


@dataclass
class Recorded:
    """The rounds of a generation, as its verifier's stream sees them."""

    proposal: draft_pb2.Proposal
    verdict: verifier_pb2.Verdict


@contextmanager
def recording() -> Iterator[list[Recorded]]:
    """Records the rounds of one generation at a time."""
    rounds: list[Recorded] = []
    verdict = VerifyStream.verdict

    async def recorded(stream: VerifyStream, proposal: draft_pb2.Proposal) -> Any:
        found = await verdict(stream, proposal)
        rounds.append(Recorded(proposal, found[0]))
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(VerifyStream, "verdict", recorded)
        yield rounds


async def proposals_of(stack: Stack, way: Way, **options: Any) -> list[tuple[list[int], list[int]]]:
    """What was drafted, round for round."""
    with recording() as rounds:
        result = await generate(stack, way, **options)
    assert result.speculation.fallback_reason == ""
    return [drafted(each.proposal) for each in rounds]


async def assert_ahead_drafts_the_same(stack: Stack) -> None:
    for way, temperature in product((Way(4), Way(6, topk=3)), (0.0, 0.9)):
        # Whoever does not run ahead is not waited for.
        waiting = await proposals_of(stack, way, temperature=temperature)
        ahead = await proposals_of(stack, way._replace(run_ahead=8), temperature=temperature)
        assert ahead == waiting, way


async def test_a_draft_that_runs_ahead_drafts_the_same(good: Stack) -> None:
    """Also if it is interrupted at any time: here it is as slow as the target."""
    await assert_ahead_drafts_the_same(good)
    with patience():
        await assert_ahead_drafts_the_same(good)


# Where trees are not wanted.


@pytest.mark.parametrize("rule", ["rejection", "block"])
async def test_rules_that_need_distributions_have_chains_one_at_a_time(
    mediocre: Stack, rule: str
) -> None:
    options = {"rule": rule, "temperature": 0.9}
    expected = await generate(mediocre, Way(6), **options)
    for way in (Way(6, topk=4), Way(6, run_ahead=8), Way(6, topk=4, run_ahead=8)):
        with recording() as rounds:
            found = await generate(mediocre, way, **options)
        assert_equal([found], [expected], way)
        assert_chains(found)
        assert not any(each.proposal.parents for each in rounds)
        assert not any(each.proposal.presumed_token_ids for each in rounds)
        assert found.speculation.run_ahead_hits == found.speculation.run_ahead_misses == 0
        # At temperature 0 they have trees as well: nothing is drawn there.
        await assert_identical(mediocre, [way], rule=rule, temperature=0.0)


@pytest.mark.parametrize(
    ("options", "topk", "parents", "reason"),
    [
        ({"rule": "rejection", "temperature": 0.9}, 4, [0, 0], "the limit is 1"),
        ({"rule": "block", "temperature": 0.9}, 4, [0, 0], "the limit is 1"),
        ({"temperature": 0.9}, 1, [0, 0], "the limit is 1"),
        ({"temperature": 0.0}, 2, [0, 0, 0], "the limit is 2"),
        ({"temperature": 0.0}, 2, [0], "came with 1 parents"),
        ({"temperature": 0.0}, 2, [0, 2, 1], "does not come before it"),
    ],
)
async def test_a_drafter_that_grows_what_is_not_allowed_is_given_up(
    mediocre: Stack,
    options: dict[str, Any],
    topk: int,
    parents: list[int],
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    propose = ModelDraftSession.propose

    async def grown(session: ModelDraftSession, *arguments: Any) -> Draft:
        return replace(await propose(session, *arguments), parents=parents)

    count = max(2, len(parents))
    expected = await generate(mediocre, Way(0), **options)
    monkeypatch.setattr(ModelDraftSession, "propose", grown)
    found = await generate(mediocre, Way(count, topk), **options)
    assert reason in found.speculation.fallback_reason
    assert found.speculation.num_draft_tokens == 0
    assert len(found.token_ids) == LENGTH
    if options.get("rule") is None:
        assert_equal([found], [expected])
    monkeypatch.undo()
    again = await generate(mediocre, Way(count, topk), **options)
    assert again.speculation.fallback_rounds == 0


# What is counted.


@TEMPERATURES
async def test_origins_and_statistics_tell_what_became_of_each_tree(
    mediocre: Stack, temperature: float
) -> None:
    origins = {gateway_pb2.TOKEN_ORIGIN_ACCEPTED: 0, gateway_pb2.TOKEN_ORIGIN_BONUS: 0}
    for way in (Way(8, topk=4), Way(3, topk=2, run_ahead=4), Way(5)):
        with recording() as rounds:
            result = await generate(mediocre, way, temperature=temperature, max_new_tokens=120)
        expected: list[int] = []
        deepest = max(len(set(depths(parents(each.proposal)))) for each in rounds)
        drafts, accepts = [0] * deepest, [0] * deepest
        for each in rounds:
            n = each.verdict.num_accepted
            for position in range(len(set(depths(parents(each.proposal))))):
                drafts[position] += 1
                accepts[position] += position < n
            accepted = list(each.verdict.token_ids)[:n]
            stands = walk(parents(each.proposal), each.proposal.token_ids, accepted)
            last = stands[-1] if stands else 0
            if not each.proposal.token_ids:
                final = gateway_pb2.TOKEN_ORIGIN_PLAIN
            elif last in parents(each.proposal):
                final = gateway_pb2.TOKEN_ORIGIN_CORRECTION
            else:
                final = gateway_pb2.TOKEN_ORIGIN_BONUS
            expected += [gateway_pb2.TOKEN_ORIGIN_ACCEPTED] * n + [final]
        assert result.origins == expected
        speculation = result.speculation
        assert list(speculation.drafted_per_position) == drafts
        assert list(speculation.accepted_per_position) == accepts
        assert speculation.rounds == len(rounds)
        nodes = sum(len(each.proposal.token_ids) for each in rounds)
        assert speculation.num_draft_tokens == nodes
        assert speculation.num_accepted_tokens == sum(accepts)
        assert speculation.rounds + speculation.num_accepted_tokens == 120
        for origin in origins:
            origins[origin] += expected.count(origin)
    assert min(origins.values()) > 0


# Bugs that these comparisons must see.


@pytest.mark.parametrize("bug", ["noise by place", "nothing moved", "no parents"])
async def test_a_bug_in_the_verifier_would_be_noticed(
    mediocre: Stack, bug: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep = CachedSequence.keep

    def keep_in_place(sequence: CachedSequence, places: list[int]) -> None:
        keep(sequence, places)
        sequence._moves.clear()

    def through_all(y: list[int], token_ids: list[int], _: Any) -> tuple[list[int], int]:
        found, here = [], 0
        while y[here] in token_ids[here:]:
            here = token_ids.index(y[here], here) + 1
            found.append(here)
        return found, y[here]

    bugs: dict[str, Callable[[], None]] = {
        "noise by place": lambda: monkeypatch.setattr(
            verifier_service.verification, "depths", lambda parents: range(1, len(parents) + 1)
        ),
        "nothing moved": lambda: monkeypatch.setattr(CachedSequence, "keep", keep_in_place),
        "no parents": lambda: monkeypatch.setattr(acceptance, "walk", through_all),
    }
    options = {"temperature": 0.9, "max_new_tokens": 60, "allowed_token_ids": range(30, 60)}
    await assert_identical(mediocre, [Way(8, topk=4)], **options)
    bugs[bug]()
    with pytest.raises((AssertionError, grpc.aio.AioRpcError)):
        await assert_identical(mediocre, [Way(8, topk=4)], **options)


async def test_what_is_kept_without_saying_so_only_costs_time(
    mediocre: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without `keep` all that was drafted is dropped from the cache, and fed again."""

    async def rows() -> int:
        with recording() as rounds:
            await assert_identical(mediocre, [Way(8, topk=4)], temperature=0.9)
        return sum(each.verdict.pass_rows for each in rounds if each.proposal.token_ids)

    kept = await rows()
    monkeypatch.setattr(CachedSequence, "keep", lambda sequence, places: None)
    assert await rows() > kept


async def test_a_proposal_for_another_verdict_would_be_noticed(
    good: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A planted bug: the gateway takes what was pushed for what it presumes to be committed."""
    monkeypatch.setattr(DraftRounds, "_presumes_wrongly", lambda rounds, proposal: False)
    with pytest.raises(AssertionError), patience():
        await assert_ahead_drafts_the_same(good)


# Any schedule.


class Breaking(draft_pb2_grpc.DraftServiceServicer):
    """In front of a draft service: breaks its streams, and repeats and withholds what it says."""

    def __init__(self, inner: Any, random: Random) -> None:
        self._inner = inner
        self._random = random
        self.broken = 0

    async def GetModelInfo(self, request: Any, context: Any) -> Any:
        return await self._inner.GetModelInfo(request, context)

    async def Draft(self, request_iterator: Any, context: Any) -> AsyncIterator[Any]:
        random = self._random
        left = random.choice([1, 2, 4, 8, 16, 1000, 1000, 1000])
        code = random.choice([grpc.StatusCode.INTERNAL, grpc.StatusCode.RESOURCE_EXHAUSTED])
        said: list[Any] = []
        async for response in self._inner.Draft(request_iterator, context):
            if left == 0:
                self.broken += 1
                await context.abort(code, "broken on purpose")
            left -= 1
            # Pushed proposals may be lost on the way and come twice, and old ones come again.
            presumed = response.proposal.presumed_token_ids
            if said and random.random() < 0.2:
                yield random.choice(said)
            if response.HasField("proposal"):
                said.append(response)
            yield response
            if presumed and random.random() < 0.2:
                yield response


@asynccontextmanager
async def schedules(
    target_folder: Path, draft_folder: Path, random: Random, patch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[Any, Breaking, Callable[[], Any]]]:
    """A gateway whose draft breaks and can be restarted, and whose controller decides at random."""
    planned = Controller.plan

    def at_random(controller: Controller, limit: int) -> DraftPlan:
        planned(controller, limit)
        row, step = random.choice([(0.0, 0.0), (0.05, 0.0), (0.3, 0.2), (0.0, 0.6)])
        costs = (row, step) if controller._confident else (0.0, 0.0)
        return DraftPlan(random.randint(0, limit), *costs)

    patch.setattr(Controller, "plan", at_random)
    port = free_port()
    async with (
        verifier(target_folder) as (verifier_address, _),
        draft(draft_folder) as (_, drafting),
        gateway(verifier_address, f"127.0.0.1:{port}", **PATIENT) as running,
    ):
        breaking = Breaking(drafting.servicer, random)
        server: list[grpc.aio.Server] = []

        async def restart() -> None:
            for old in server:
                await old.stop(0)
            server[:] = [grpc.aio.server()]
            draft_pb2_grpc.add_DraftServiceServicer_to_server(breaking, server[0])
            assert server[0].add_insecure_port(f"127.0.0.1:{port}") == port
            await server[0].start()

        await restart()
        try:
            yield running, breaking, restart
        finally:
            await server[0].stop(0)


async def run_schedules(
    target_folder: Path, draft_folder: Path, number: int, patch: pytest.MonkeyPatch
) -> dict[str, int]:
    """Generates in random ways while the draft breaks at random times. Returns some counts."""
    random = Random(number)
    told = dict.fromkeys(("accepted", "hits", "fallbacks", "stale", "undrafted", "branches"), 0)
    plain: dict[Any, Result] = {}
    async with schedules(target_folder, draft_folder, random, patch) as (
        running,
        breaking,
        restart,
    ):
        for index in range(number):
            options: dict[str, Any] = {
                "prompt": [*range(3, 3 + random.choice([4, 15, 16, 17, 40]))],
                "temperature": random.choice([0.0, 0.9]),
                "presence_penalty": random.choice([0.0, 0.0, 0.5]),
                "seed": random.randint(0, 2),
                "max_new_tokens": random.choice([6, 20, 30]),
            }
            stack = Stack(running, Any, None)  # type: ignore[arg-type]
            name = repr(options)
            if name not in plain:
                plain[name] = await generate(stack, Way(0), **options)
            way = Way(
                random.randint(1, 16),
                random.choice([1, 2, 4]),
                random.choice([0, 0, 4, 8, 64]),
                random.random() < 0.5,
            )
            sending = asyncio.create_task(generate(stack, way, **options))
            if index % 7 == 3:
                await asyncio.wait({sending}, timeout=random.choice([0.0, 0.01, 0.03]))
                await restart()
            result = await sending
            assert_equal([result], [plain[name]], (index, way, options))
            speculation = result.speculation
            told["accepted"] += speculation.num_accepted_tokens
            told["hits"] += speculation.run_ahead_hits
            told["fallbacks"] += speculation.fallback_rounds
            told["stale"] += speculation.stale_proposals
            told["undrafted"] += speculation.undrafted_rounds
            told["branches"] += speculation.num_draft_tokens > sum(speculation.drafted_per_position)
        told["broken"] = breaking.broken
    return told


async def test_fifteen_schedules_give_what_plain_decoding_gives(
    target_folder: Path, good_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = await run_schedules(target_folder, good_folder, 15, monkeypatch)
    assert told["accepted"] > 0, told


@pytest.mark.slow
async def test_hundreds_of_schedules_give_what_plain_decoding_gives(
    target_folder: Path,
    good_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    record_property: Any,
) -> None:
    told = await run_schedules(target_folder, good_folder, 200, monkeypatch)
    for name, value in told.items():
        record_property(name, value)
    assert min(told.values()) > 0, told
