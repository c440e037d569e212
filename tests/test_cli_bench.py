"""`specdec bench`: what it sends, measures, says and writes."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from specdec.bench import prompts
from specdec.bench.load import Call
from specdec.bench.measures import percentile, summarise
from specdec.bench.sweep import MODES, Plan
from specdec.v1 import gateway_pb2
from tests.cli import ACCEPTED, PLAIN, Scripted, scripted, specdec, started
from tests.test_cli_up import interrupted, left_running

TINY = ("--repeats", "1", "--max-new-tokens", "8")


class HangAfter(list[gateway_pb2.GenerateRequest]):
    """The requests of a gateway that answers only the first of them."""

    def __init__(self, count: int, gateway: Scripted) -> None:
        super().__init__()
        self._count, self._gateway = count, gateway

    def append(self, request: gateway_pb2.GenerateRequest) -> None:
        super().append(request)
        if len(self) > self._count:
            self._gateway._then = "hang"


def _lines_of_file(text: str) -> int:
    """Of the one fenced block at the end of a prompt."""
    _, file, end = text.split("```")
    assert not end
    return file.count("\n") - 1


def test_the_suite_has_six_kinds_of_distinct_prompts() -> None:
    suite = prompts.load()
    assert len({prompt.text for prompt in suite}) == len({prompt.id for prompt in suite})
    assert len(suite) >= 96
    assert {prompt.kind for prompt in suite} == set(prompts.KINDS)
    for kind in prompts.KINDS:
        texts = [prompt.text for prompt in suite if prompt.kind == kind]
        assert len(texts) >= 16
        if kind in ("summarise", "extraction"):
            assert all(100 <= len(text.split()) <= 220 for text in texts)
        if kind == "edit":
            assert all(700 <= len(text) <= 1300 for text in texts)
            assert all(25 <= _lines_of_file(text) <= 45 for text in texts)


def test_a_mixture_takes_kinds_by_turns() -> None:
    mixture = prompts.mixed(("code", "chat"), seed=1)
    assert [prompt.kind for prompt in mixture[:4]] == ["code", "chat", "code", "chat"]
    assert mixture == prompts.mixed(("code", "chat"), seed=1)
    assert mixture != prompts.mixed(("code", "chat"), seed=2)


def test_a_measurement_has_each_prompt_once_and_modes_have_the_same() -> None:
    suite = prompts.mixed(prompts.KINDS, seed=0)
    plan = Plan(suite, concurrency=(1, 16), repeats=2)
    points = list(plan.points())
    assert [(p.repeat, p.concurrency, p.mode) for p in points] == [
        *((0, 1, "plain"), (0, 1, "speculative"), (0, 16, "plain"), (0, 16, "speculative")),
        *((1, 1, "speculative"), (1, 1, "plain"), (1, 16, "speculative"), (1, 16, "plain")),
    ]
    assert [point.num_requests for point in points] == [4, 4, 32, 32, 4, 4, 32, 32]
    for point in points:
        chosen = plan.prompts_of(point)
        assert len({prompt.id for prompt in chosen}) == point.num_requests
    assert plan.prompts_of(points[2]) == plan.prompts_of(points[3])
    assert not set(plan.prompts_of(points[0])) & set(plan.prompts_of(points[4]))


def test_percentiles_lie_between_the_nearest_values() -> None:
    assert percentile([], 50) is None
    assert percentile([3.0], 95) == 3.0
    assert percentile([4.0, 1.0, 2.0, 3.0], 50) == 2.5
    assert percentile(range(101), 95) == 95


def test_the_numbers_of_two_calls() -> None:
    speculation = gateway_pb2.SpeculationStatistics(
        rounds=2, num_draft_tokens=6, num_accepted_tokens=3, draft_us=4000, verify_us=6000
    )
    completion = gateway_pb2.Completion(speculation=speculation)
    completion.usage.prompt_tokens = 10
    completion.usage.cached_tokens = 4
    good = Call(
        *("code", "code-01"),
        begun=1.0,
        ended=3.0,
        arrivals=[(1.5, 2), (2.1, 3), (2.3, 1)],
        token_ids=[1, 2, 3, 4, 5, 6],
        completion=completion,
    )
    cut_off = Call("chat", "chat-01", begun=1.0, ended=1.2, arrivals=[(1.1, 1)], token_ids=[1])
    # A chunk's time is spread over its tokens, and the first chunk has none.
    assert good.inter_token == pytest.approx([0.2, 0.2, 0.2, 0.2])
    summary = summarise([good, cut_off], seconds=3.0)
    assert (summary.requests, summary.failed) == (2, 1)
    assert summary.errors == {"the answer ended early": 1}
    assert (summary.tokens, summary.tokens_per_second) == (6, 2.0)
    assert summary.ttft_ms_p50 == pytest.approx(500)
    assert summary.latency_ms_p95 == pytest.approx(2000)
    assert (summary.prompt_tokens, summary.cached_tokens) == (10, 4)
    assert summary.speculation.acceptance_rate == 0.5
    assert summary.speculation.mean_acceptance_length == 2.5
    assert (summary.speculation.draft_ms, summary.speculation.verify_ms) == (2.0, 3.0)
    assert list(summary.kinds) == ["code"]


async def test_a_sweep_measures_both_modes_and_writes_all_of_it(tmp_path: Path) -> None:
    file, folder = tmp_path / "results.json", tmp_path / "plots"
    async with scripted(("a", ACCEPTED), ("b", PLAIN), ("c", PLAIN)) as gateway:
        run = await specdec(
            *("bench", "--address", gateway.address, "--concurrency", "1,3", "--repeats", "2"),
            *("--requests", "3", "--max-new-tokens", "8", "-k", "4", "--rule", "block"),
            *("--kinds", "code,chat", "--json", file, "--plot", folder),
        )
    assert run.status == 0, run
    assert re.search(r"^ +3 +speculative +6 +0 +\d", run.out, re.MULTILINE), run.out
    assert len(re.findall(r"^\d/8  repeat", run.err, re.MULTILINE)) == 8

    document: dict[str, Any] = json.loads(file.read_text())
    assert document["interrupted"] is False
    assert document["settings"]["rule"] == "block"
    assert document["machine"]["cores"] >= 1
    assert [(x["concurrency"], x["mode"]) for x in document["levels"]] == [
        (count, mode) for count in (1, 3) for mode in MODES
    ]
    assert all(x["medians"]["tokens_per_second"] > 0 for x in document["levels"])
    assert [(x["concurrency"], x["pairs"]) for x in document["speedups"]] == [(1, 2), (3, 2)]
    assert set(document["kinds"]) == {"code", "chat"}
    assert [x["tokens"] for x in document["measurements"]] == [9] * 8
    names = {path.stem for path in folder.iterdir()}
    assert names == {"throughput", "ttft", "inter-token", "latency", "rounds", "kinds"}
    for path in folder.iterdir():
        with Image.open(path) as image:
            assert image.format == "PNG"
            assert min(image.size) > 300

    # The warm-up is 3 requests in each mode; then each measurement shares with itself only.
    sent = gateway.requests
    assert len(sent) == 6 + 8 * 3
    measured = [sent[6 + 3 * index : 9 + 3 * index] for index in range(8)]
    salts = [{request.prefix_cache.salt for request in one} for one in measured]
    assert all(len(salt) == 1 for salt in salts)
    assert len(set.union(*salts)) == 8
    for one in measured:
        assert len({request.chat.messages[0].content for request in one}) == 3
    for request in sent:
        assert request.sampling.temperature == 0.0
        assert request.speculation.num_draft_tokens == (4 if request.speculation.enabled else 0)


async def test_failures_are_counted_by_name() -> None:
    async with scripted(("a", PLAIN), then="fail") as gateway:
        run = await specdec("bench", "--address", gateway.address, *TINY)
    # Not even the warm-up got an answer.
    assert "UNAVAILABLE: Socket closed" in run.error.splitlines()[-1]


async def test_requests_that_take_too_long_are_failures(tmp_path: Path) -> None:
    async with scripted(("a", PLAIN)) as gateway:
        gateway.requests = HangAfter(1, gateway)
        command = ("bench", "--address", gateway.address, "--concurrency", "1", *TINY)
        options = ("--modes", "plain", "--timeout", "0.5", "--json", tmp_path / "out.json")
        run = await specdec(*command, *options)
    assert run.status == 0
    assert re.search(r"^4 failed: no end within the timeout$", run.out, re.MULTILINE)
    assert json.loads((tmp_path / "out.json").read_text())["errors"]


async def test_ctrl_c_prints_what_is_there(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    async with scripted(("a", PLAIN), ("b", PLAIN)) as gateway:
        command = ("bench", "--address", gateway.address, "--concurrency", "1,2")
        streams = {"stderr": asyncio.subprocess.PIPE}
        async with started(
            *command, *("--repeats", "100", "--max-new-tokens", "8", "--json", file), **streams
        ) as process:
            assert process.stderr is not None
            while not (await process.stderr.readline()).startswith(b"3/400"):
                pass
            run = await interrupted(process)
    assert run.status == 130
    assert re.search(r"^ +1 +plain +\d", run.out, re.MULTILINE)
    assert json.loads(file.read_text())["interrupted"] is True


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--address", "198.51.100.7:50051"), "198.51.100.7:50051 is not on this machine"),
        (("--address", "127.0.0.1:1"), "no gateway at 127.0.0.1:1"),
        (("--address", "127.0.0.1:1", "--json", "/nowhere/x.json"), "there is no folder /nowhere"),
    ],
)
async def test_what_cannot_be_is_said_in_one_line(options: tuple[str, ...], message: str) -> None:
    run = await specdec("bench", *options)
    assert run.status == 1
    assert message in run.err.splitlines()[-1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--concurrency", "1,x"), "no list of numbers"),
        (("--concurrency", "0"), "numbers of clients are from 1"),
        (("--concurrency", "500"), "uses each prompt once"),
        (("--concurrency", "8", "--requests", "4"), "cannot keep 8 clients busy"),
        (("--kinds", "poetry"), "'poetry' is none of code, reasoning"),
        (("--draft", "x"), "name the --target that it is for"),
        (("--modes", "fast"), "'fast' is none of plain, speculative"),
    ],
)
async def test_wrong_options_are_refused(options: tuple[str, ...], message: str) -> None:
    run = await specdec("bench", *options, COLUMNS="200")
    assert run.status == 2
    assert message in run.err


@pytest.mark.slow
async def test_it_starts_a_pair_itself_and_leaves_nothing(
    target_folder: Path, draft_folder: Path, tmp_path: Path
) -> None:
    file = tmp_path / "out.json"
    command = ("bench", "--target", target_folder, "--draft", draft_folder, "--dtype", "float32")
    # Prompts this short are no measure of a draft, so that the controller may as well use none.
    options = ("--kinds", "chat", "--concurrency", "2", "--no-adaptive", *TINY, "--json", file)
    async with started(*command, *options) as process:
        _, err = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 0
    document = json.loads(file.read_text())
    plain, speculative = document["levels"]
    assert plain["failed"] == speculative["failed"] == 0
    assert plain["medians"]["acceptance_rate"] is None
    assert speculative["medians"]["acceptance_rate"] > 0
    assert speculative["medians"]["verify_ms"] > 0
    assert speculative["fallback_rounds"] == 0
    assert not document["errors"]
    assert not left_running(*map(int, re.findall(r"listening on [\d.]+:(\d+)", err.decode())))
