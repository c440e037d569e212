"""Drafters behind the draft service: matching ones, combinations, and those of other packages."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import grpc
import pytest

from draft_service.__main__ import serve
from draft_service.combination import CombinedSession
from draft_service.drafter import Draft, DraftSession
from draft_service.lookup import NgramIndex
from draft_service.registry import make_drafter
from draft_service.service import DraftServicer
from draft_service.settings import DraftSettings
from specdec import services
from specdec.cli.health import wait_until_ready
from specdec.errors import reason_of
from specdec.serving import StartError
from specdec.settings import load
from specdec.v1 import common_pb2, draft_pb2, draft_pb2_grpc
from tests.models import make_model, permuted_tokens
from tests.stack import draft, free_port, pair
from tests.test_streams import DraftClient, opening, sampling

RULES = common_pb2.AcceptanceRule.values()[1:]
COPYING = [["lookup"], ["suffix"], ["lookup", "suffix"]]
REPEATING = [5, 6, 7, 8, 9, 5, 6, 7]


@asynccontextmanager
async def drafting(model: Path | None = None, **options: Any) -> AsyncIterator[grpc.aio.Channel]:
    async with (
        draft(model, max_num_draft_tokens=8, **options) as (address, _),
        grpc.aio.insecure_channel(address) as channel,
    ):
        yield channel


def opens(prompt: Sequence[int], **changes: Any) -> common_pb2.Open:
    committed = changes.pop("committed", [])
    changes = {"base_length": len(prompt) + len(committed), **changes}
    return opening(committed, prompt_token_ids=prompt, **changes)


# The stream, whoever drafts.


@pytest.mark.parametrize("drafters", COPYING, ids=",".join)
async def test_what_followed_before_is_proposed(drafters: list[str]) -> None:
    async with drafting(drafters=drafters) as channel:
        client = DraftClient(channel)
        first = await client.open(opens(REPEATING))
        assert list(first.token_ids) == [8, 9, 5]
        assert (first.round, first.base_length, first.temperature) == (1, 8, 0.8)
        second = await client.advance(round=2, base_length=8, token_ids=[8, 50], num_draft_tokens=3)
        assert not second.token_ids
        third = await client.advance(round=3, base_length=10, token_ids=[6, 7], num_draft_tokens=3)
        assert list(third.token_ids) == [8, 50, 6]
        assert (third.round, third.base_length) == (3, 12)


@pytest.mark.parametrize("drafters", COPYING, ids=",".join)
async def test_a_copying_session_resumes_on_a_fresh_stream(drafters: list[str]) -> None:
    async with drafting(drafters=drafters) as channel:
        whole = DraftClient(channel)
        await whole.open(opens(REPEATING))
        expected = await whole.advance(
            round=2, base_length=8, token_ids=[50, 8, 9], num_draft_tokens=3
        )
        resumed = await DraftClient(channel).open(opens(REPEATING, committed=[50, 8, 9], round=2))
        assert expected.token_ids == resumed.token_ids
        assert (resumed.round, resumed.base_length) == (2, 11)


async def test_stale_messages_and_gaps_are_handled_without_a_model() -> None:
    async with drafting(drafters=["lookup"]) as channel:
        client, neighbour = DraftClient(channel), DraftClient(channel)
        await client.open(opens(REPEATING))
        await neighbour.open(opens(REPEATING))
        await client.send(round=1, base_length=8, token_ids=[1], num_draft_tokens=3)
        after = await client.advance(round=2, base_length=8, token_ids=[8], num_draft_tokens=3)
        assert (after.round, after.base_length) == (2, 9)
        assert list(after.token_ids) == [9, 5, 6]
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await client.advance(round=3, base_length=11, token_ids=[9], num_draft_tokens=3)
        assert reason_of(caught.value) == "CONTRACT_VIOLATION"
        other = await neighbour.advance(round=2, base_length=8, token_ids=[8], num_draft_tokens=3)
        assert list(other.token_ids) == [9, 5, 6]


async def test_a_round_that_wants_no_draft_still_counts() -> None:
    async with drafting(drafters=["lookup"]) as channel:
        client = DraftClient(channel)
        await client.open(opens([1, 2, 3]))
        none = await client.advance(round=2, base_length=3, token_ids=[4, 1], num_draft_tokens=0)
        assert not none.token_ids
        some = await client.advance(round=3, base_length=5, token_ids=[2], num_draft_tokens=2)
        assert list(some.token_ids) == [3, 4]


@pytest.mark.parametrize("rule", RULES)
async def test_a_copied_token_is_certain_where_the_rule_asks(rule: Any) -> None:
    async with drafting(drafters=["suffix"]) as channel:
        sampled = await DraftClient(channel).open(opens(REPEATING, acceptance_rule=rule))
        greedy = await DraftClient(channel).open(
            opens(REPEATING, acceptance_rule=rule, sampling=sampling())
        )
    certain = [([token_id], [1.0]) for token_id in sampled.token_ids]
    assert len(certain) == 3
    needed = rule != common_pb2.ACCEPTANCE_RULE_COUPLED
    found = [(list(q.token_ids), list(q.probabilities)) for q in sampled.distributions]
    assert found == (certain if needed else [])
    assert not greedy.distributions


async def test_the_handshake_says_how_it_drafts_and_for_whom(draft_folder: Path) -> None:
    async def info(model: Path | None, drafters: list[str]) -> common_pb2.ModelInfo:
        async with drafting(model, drafters=drafters) as channel:
            request = draft_pb2.DraftServiceGetModelInfoRequest()
            return (await draft_pb2_grpc.DraftServiceStub(channel).GetModelInfo(request)).model_info

    free = await info(None, ["suffix", "lookup"])
    assert (free.any_tokenizer, free.drafters) == (True, "suffix, lookup")
    assert (free.tokenizer_sha256, free.max_num_draft_tokens) == ("", 8)
    bound = await info(draft_folder, ["lookup", "model"])
    assert (bound.any_tokenizer, bound.drafters) == (False, "lookup, model")
    model = await info(draft_folder, ["model"])
    model.drafters = bound.drafters
    assert bound == model


async def test_any_tokens_of_any_tokenizer_are_taken() -> None:
    async with drafting(drafters=["lookup"]) as channel:
        big = [4_000_000_000, 7, 8, 4_000_000_000, 7]
        proposal = await DraftClient(channel).open(opens(big, tokenizer_sha256="f" * 64))
        assert list(proposal.token_ids) == [8, 4_000_000_000, 7]


async def test_sessions_may_go_on_for_a_while_when_the_service_is_ended(draft_folder: Path) -> None:
    config = DraftSettings(
        model=str(draft_folder), port=free_port(), num_threads=1, grace_seconds=30.0
    )
    serving = asyncio.create_task(serve(config, DraftServicer(config.max_sessions)))
    async with grpc.aio.insecure_channel(f"127.0.0.1:{config.port}") as channel:
        assert await wait_until_ready(services.DRAFT, f"127.0.0.1:{config.port}", 60) is None
        client = DraftClient(channel)
        await client.open(opening())
        serving.cancel()
        await asyncio.sleep(0.1)
        async with asyncio.timeout(10):
            after = await client.advance(round=2, base_length=4, token_ids=[9], num_draft_tokens=3)
            assert len(after.token_ids) == 3
            await client.end()
            await asyncio.gather(serving, return_exceptions=True)


# Combinations.


class Scripted(DraftSession):
    """Says what it was told to say, and remembers what it was told."""

    def __init__(self, *drafts: Draft) -> None:
        super().__init__(common_pb2.Opened())
        self._drafts = list(drafts)
        self.told: list[int] = []

    async def propose(self, committed: Sequence[int], num_draft_tokens: int) -> Draft:
        self.told += committed
        return self._drafts.pop(0)


NOTHING = Draft(())


@pytest.mark.parametrize(
    ("first", "second", "third", "expected"),
    [
        pytest.param(
            Draft([1], match_length=4), Draft([2], match_length=9), Draft([3]), 1, id="long enough"
        ),
        pytest.param(
            Draft([1], match_length=3), Draft([2], match_length=4), Draft([3]), 2, id="the next"
        ),
        pytest.param(
            Draft([1], match_length=3), Draft([2], match_length=3), Draft([3]), 3, id="the model"
        ),
        pytest.param(Draft([1]), Draft([2], match_length=9), Draft([3]), 1, id="not from a match"),
        pytest.param(NOTHING, NOTHING, Draft([3]), 3, id="only the model"),
        pytest.param(
            Draft([1], match_length=2),
            Draft([2], match_length=3),
            NOTHING,
            2,
            id="the longest of short",
        ),
        pytest.param(
            Draft([1], match_length=3),
            Draft([2], match_length=3),
            NOTHING,
            1,
            id="the first of equal",
        ),
        pytest.param(NOTHING, NOTHING, NOTHING, None, id="nobody"),
    ],
)
async def test_the_first_with_a_long_enough_match_proposes(
    first: Draft, second: Draft, third: Draft, expected: int | None
) -> None:
    combined = CombinedSession([Scripted(each) for each in (first, second, third)], 4)
    draft = await combined.propose((), 5)
    assert list(draft.token_ids) == ([] if expected is None else [expected])


async def test_a_short_match_is_a_branch_of_what_a_model_says() -> None:
    """The likelier token of both is kept, and the tree has no more tokens than were asked for."""
    copy = Draft([1, 2], probabilities=[0.4, 0.2], match_length=2)
    said = Draft([1, 3, 4], parents=[0, 0, 1], probabilities=[0.5, 0.3, 0.1])
    combined = CombinedSession([Scripted(copy), Scripted(said)], 4, topk=2)
    draft = await combined.propose((), 3)
    assert list(draft.token_ids) == [1, 3, 2]
    assert list(draft.parents) == [0, 0, 1]
    assert list(draft.probabilities) == [0.5, 0.3, 0.2]


@pytest.mark.parametrize(
    ("copy", "said"),
    [
        (Draft([1, 2], match_length=2), Draft([3], probabilities=[0.5])),
        (Draft([1], probabilities=[0.4], match_length=2), Draft([3])),
    ],
)
async def test_drafts_of_unknown_chances_stay_apart(copy: Draft, said: Draft) -> None:
    """As those of a drafter of one's own, which need not tell any."""
    combined = CombinedSession([Scripted(copy), Scripted(said)], 4, topk=4)
    assert await combined.propose((), 5) == said


async def test_those_that_were_not_asked_are_told_later_what_they_missed() -> None:
    sure, unsure = Draft([1], match_length=9), Draft([1], match_length=1)
    first = Scripted(sure, sure, unsure, sure, unsure)
    model = Scripted(Draft([3]), Draft([3]))
    combined = CombinedSession([first, model], 4)
    await combined.propose((), 1)
    await combined.propose([10, 11], 1)
    assert model.told == []
    await combined.propose([12], 1)
    assert model.told == [10, 11, 12]
    await combined.propose([13], 1)
    await combined.propose([14, 15], 1)
    assert model.told == first.told == list(range(10, 16))


@pytest.mark.parametrize("rule", RULES)
async def test_the_model_keeps_up_while_others_propose(draft_folder: Path, rule: Any) -> None:
    """After rounds of lookup it drafts what it would have drafted had it always been asked."""
    rounds = [[8], [9, 5, 6, 7], [8, 9, 40], [41], [42, 5, 6, 7, 8, 9]]
    fields = {"acceptance_rule": rule, "num_draft_tokens": 4}
    async with (
        drafting(draft_folder, drafters=["lookup", "model"], min_match=3) as both,
        drafting(draft_folder) as model,
        drafting(drafters=["lookup"], min_match=3) as lookup,
    ):
        clients = [DraftClient(channel) for channel in (both, model, lookup)]
        proposals = [await client.open(opens(REPEATING, **fields)) for client in clients]
        base_length, asked = len(REPEATING), []
        for number, tokens in enumerate([*rounds, []], 2):
            combined, alone, copied = proposals
            copies = match_length([*REPEATING, *chain(*rounds[: number - 2])]) >= 3
            asked.append(copies)
            assert combined.token_ids == (copied if copies else alone).token_ids
            for q, expected in zip(
                combined.distributions, (copied if copies else alone).distributions, strict=True
            ):
                assert q.token_ids == expected.token_ids
                assert list(q.probabilities) == pytest.approx(
                    list(expected.probabilities), rel=1e-4
                )
            proposals = [
                await client.advance(
                    round=number, base_length=base_length, token_ids=tokens, num_draft_tokens=4
                )
                for client in clients
            ]
            base_length += len(tokens)
    assert asked == [True, True, True, False, False, True]


def match_length(tokens: Sequence[int]) -> int:
    """How long a match lookup has."""
    index = NgramIndex(5)
    index.extend(tokens)
    match = index.match()
    return match.length if match else 0


# Names.


def refusal(**options: Any) -> str:
    with pytest.raises(StartError) as caught:
        make_drafter(DraftSettings(**options))
    return str(caught.value)


def test_an_unknown_name_is_refused_with_those_that_are_known() -> None:
    assert refusal(drafters=["lookup", "loopup"]) == (
        "--drafters: there is no drafter 'loopup'; there are lookup, model, suffix"
    )


def test_what_does_not_go_together_is_refused() -> None:
    assert "each may be named once" in refusal(drafters=["lookup", "lookup"])
    assert "model must come last" in refusal(drafters=["model", "lookup"])
    assert "none of --drafters runs one" in refusal(drafters=["lookup"], model="some/model")
    assert "is for suffix" in refusal(drafters=["lookup"], remember_outputs=True)


def test_the_names_come_in_order_from_flag_and_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert load(DraftSettings, []).drafters == ["lookup", "model"]
    assert load(DraftSettings, ["--drafters", "suffix,model"]).drafters == ["suffix", "model"]
    monkeypatch.setenv("SPECDEC_DRAFT_DRAFTERS", "lookup, suffix")
    assert load(DraftSettings, []).drafters == ["lookup", "suffix"]


def installed(folder: Path, module: str, program: str, **entry_points: str) -> None:
    """Makes a folder look like one that a package was installed to."""
    (folder / f"{module}.py").write_text(program)
    metadata = folder / f"{module}-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
    lines = [f"{name} = {value}" for name, value in entry_points.items()]
    (metadata / "entry_points.txt").write_text("\n".join(["[specdec.drafters]", *lines, ""]))


def example() -> str:
    """The drafter that docs/drafts.md shows."""
    text = (Path(__file__).parents[1] / "docs" / "drafts.md").read_text(encoding="utf-8")
    [program] = [
        part.partition("```")[0] for part in text.split("```python\n")[1:] if "DraftSession" in part
    ]
    return program


async def test_the_drafter_of_the_documentation_drafts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    installed(tmp_path, "my_drafts", example(), boilerplate="my_drafts:BoilerplateDrafter")
    async with drafting(drafters=["boilerplate", "lookup"]) as channel:
        client = DraftClient(channel)
        from my_drafts import NOTICE  # type: ignore[import-not-found]

        first = await client.open(opens([1, 2, *NOTICE[:3]], num_draft_tokens=4))
        assert list(first.token_ids) == NOTICE[3:7]
        second = await client.advance(
            round=2, base_length=5, token_ids=[*NOTICE[3:6], 77, 1], num_draft_tokens=2
        )
        assert not second.token_ids
        third = await client.advance(round=3, base_length=10, token_ids=[2], num_draft_tokens=2)
        assert list(third.token_ids) == NOTICE[2:4]


def test_what_cannot_be_loaded_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    installed(
        tmp_path,
        "other_drafts",
        "thing = 3\n",
        absent="other_drafts:Absent",
        thing="other_drafts:thing",
        nowhere="no_such_module:Drafter",
    )
    assert "absent cannot be loaded" in refusal(drafters=["absent"])
    assert "which is no Drafter" in refusal(drafters=["thing"])
    assert "no_such_module" in refusal(drafters=["nowhere"])


# Without torch.

_WITHOUT_TORCH = """
import asyncio, sys
import grpc
from draft_service.__main__ import serve
from draft_service.service import DraftServicer
from draft_service.settings import DraftSettings
from specdec.settings import load
from specdec.v1 import common_pb2, draft_pb2, draft_pb2_grpc

async def main():
    config = load(DraftSettings, sys.argv[1:])
    task = asyncio.create_task(serve(config, DraftServicer(config.max_sessions)))
    async with grpc.aio.insecure_channel(f"127.0.0.1:{config.port}") as channel:
        call = draft_pb2_grpc.DraftServiceStub(channel).Draft(wait_for_ready=True)
        opening = common_pb2.Open(
            session_id="s", round=1, base_length=5, prompt_token_ids=[1, 2, 3, 1, 2],
            sampling=common_pb2.Sampling(top_p=1.0, repetition_penalty=1.0),
            acceptance_rule=common_pb2.ACCEPTANCE_RULE_COUPLED, num_draft_tokens=1,
        )
        await call.write(draft_pb2.DraftRequest(open=opening))
        await call.read()
        assert list((await call.read()).proposal.token_ids) == [3]
        call.cancel()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)

asyncio.run(main())
print(sorted(name for name in sys.modules if name.partition(".")[0] in
      ("torch", "transformers", "numpy", "tokenizers", "llguidance")))
print(sorted(name for name in sys.modules if name.startswith("specdec.lm")))
"""


@pytest.mark.parametrize("drafters", COPYING, ids=",".join)
def test_without_a_model_torch_is_not_even_imported(drafters: list[str]) -> None:
    arguments = ["--port", str(free_port()), "--drafters", ",".join(drafters)]
    if "suffix" in drafters:
        arguments.append("--remember-outputs")
    run = subprocess.run(
        [sys.executable, "-c", _WITHOUT_TORCH, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines()[-2:] == ["[]", "['specdec.lm', 'specdec.lm.settings']"]


# Through the gateway.

COMBINATIONS = [
    pytest.param(["lookup"], False, id="lookup"),
    pytest.param(["suffix"], False, id="suffix"),
    pytest.param(["lookup", "model"], True, id="lookup,model"),
    pytest.param(["suffix", "lookup", "model"], True, id="suffix,lookup,model"),
]
PROMPT = [65, 66, 67, 68, 65, 66, 67, 68, 65, 66]


@pytest.mark.slow
@pytest.mark.parametrize(("drafters", "has_model"), COMBINATIONS)
async def test_the_output_is_that_of_plain_decoding(
    target_folder: Path, draft_folder: Path, drafters: list[str], has_model: bool
) -> None:
    """Greedy and COUPLED, with processors and forms that forbid what is copied."""
    requests: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.0, "logit_bias": {70: 4.0, 71: 3.0}},
        {"temperature": 0.0, "suppressed_token_ids": list(range(60, 68))},
        {"temperature": 0.0, "allowed_token_ids": list(range(60, 75)), "frequency_penalty": 0.5},
        {"temperature": 0.0, "grammar": common_pb2.Grammar(regex="([ab]{2}|[cd]{3}){12}")},
        *({"rule": "coupled", "temperature": 0.5, "seed": seed} for seed in range(3)),
        {"rule": "coupled", "seed": 1, "grammar": common_pb2.Grammar(regex="(ab|ba|cc){20}")},
        {"rule": "coupled", "seed": 2, "allowed_token_ids": [65, 66, 67]},
    ]
    options: dict[str, Any] = {
        "drafters": drafters,
        "min_match": 3,
        "remember_outputs": "suffix" in drafters,
    }
    drafted = accepted = 0
    async with pair(
        target_folder, draft_folder if has_model else None, draft_options=options
    ) as stack:
        for request in requests:
            fields = {"max_new_tokens": 60, "ignore_eos": "grammar" not in request, **request}
            expected = await stack.generate(PROMPT, k=0, **fields)
            for k in (4, 4, 7):  # also with the output remembered
                found = await stack.generate(PROMPT, k=k, **fields)
                assert found.token_ids == expected.token_ids, request
                assert found.text == expected.text
                drafted += found.speculation.num_draft_tokens
                accepted += found.speculation.num_accepted_tokens
    assert 0 < accepted < drafted


@pytest.mark.parametrize("rule", ["rejection", "block"])
@pytest.mark.parametrize(("drafters", "has_model"), COMBINATIONS)
async def test_rules_that_need_q_are_served(
    target_folder: Path, draft_folder: Path, drafters: list[str], has_model: bool, rule: str
) -> None:
    options = {"drafters": drafters, "min_match": 3}
    async with pair(
        target_folder, draft_folder if has_model else None, draft_options=options
    ) as stack:
        accepted = 0
        for seed in range(4):
            result = await stack.generate(
                PROMPT,
                k=4,
                rule=rule,
                seed=seed,
                temperature=0.4,
                max_new_tokens=60,
                allowed_token_ids=[65, 66, 67],
                ignore_eos=True,
            )
            assert set(result.token_ids) <= {65, 66, 67}
            assert "unusable" not in result.speculation.fallback_reason
            accepted += result.speculation.num_accepted_tokens
        assert accepted > 0


@pytest.mark.parametrize("drafters", COPYING, ids=",".join)
async def test_what_repeats_itself_is_generated_in_few_rounds(
    target_folder: Path, drafters: list[str]
) -> None:
    """Each line is copied from the line before, but for its number."""
    form = common_pb2.Grammar(regex="(row [0-9]: a value that repeats\n){12}")
    async with pair(target_folder, None, draft_options={"drafters": drafters}) as stack:
        result = await stack.generate(
            PROMPT, k=5, temperature=0.0, max_new_tokens=400, grammar=form
        )
    assert result.text.count("repeats") == 12
    speculation = result.speculation
    assert 1 + speculation.num_accepted_tokens / speculation.rounds > 2


async def test_a_draft_for_any_tokenizer_fits_every_target(tmp_path: Path) -> None:
    target = make_model(tmp_path / "model", seed=1, rows=300, table=permuted_tokens(300))
    async with pair(target, None, draft_options={"drafters": ["lookup"]}) as stack:
        result = await stack.generate(PROMPT, k=4, temperature=0.0, max_new_tokens=100)
        assert result.speculation.num_draft_tokens > 0
