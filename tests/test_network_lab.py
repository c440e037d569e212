"""The network lab: impaired links, closed forms, and what is simulated from a log."""

from __future__ import annotations

import asyncio
import contextlib
import json
import statistics
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from benchmarks import coupled_noise, network_cells, tree_simulator
from benchmarks.closed_forms import (
    Costs,
    expected_length,
    mean_alpha,
    overlapped_speed,
    plain_speed,
    synchronous_speed,
)
from benchmarks.coupled_noise import COUPLED, FRESH, GREEDY, PLAIN, REJECTION, SHARED, Draws
from benchmarks.distribution_log import DistributionLog, Floats
from benchmarks.impaired_link import Conditions, ImpairedLink
from benchmarks.network_cells import Cell, Sample
from benchmarks.run_ahead_simulator import allocation, rounds_of
from benchmarks.tree_simulator import Contexts, fitted_beta, trees_of
from specdec.bench.prompts import Prompt

# The link.


pytestmark = pytest.mark.slow


@asynccontextmanager
async def echo() -> AsyncIterator[int]:
    """A server that sends back what it gets. Yields its port."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                writer.write(data)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


async def round_trips(port: int, count: int) -> list[float]:
    """Seconds of small messages, one after the other on one connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    found = []
    for _ in range(count):
        begun = time.perf_counter()
        writer.write(b"x")
        await reader.readexactly(1)
        found.append(time.perf_counter() - begun)
    writer.close()
    return found


async def test_the_round_trip_is_twice_the_delay() -> None:
    async with echo() as port:
        with ImpairedLink(port) as link:
            for milliseconds in (1, 5, 20):
                link.conditions = Conditions(delay=milliseconds / 2000)
                found = await round_trips(link.port, 25)
                # A machine with other work makes it longer at times, never shorter.
                assert min(found) >= milliseconds / 1000
                assert 1000 * min(found) == pytest.approx(milliseconds, abs=1.0)
                assert 1000 * statistics.median(found) == pytest.approx(milliseconds, abs=6.0)


async def test_jitter_delays_and_keeps_the_order() -> None:
    async with echo() as port:
        with ImpairedLink(port, Conditions(jitter=0.01)) as link:
            # Up to 10 ms each way.
            assert 0.005 < statistics.median(await round_trips(link.port, 30)) < 0.02
            reader, writer = await asyncio.open_connection("127.0.0.1", link.port)
            sent = bytes(range(100))
            for byte in sent:
                writer.write(bytes([byte]))
                await asyncio.sleep(0.0005)
            assert await reader.readexactly(len(sent)) == sent
            writer.close()


async def test_bandwidth_and_the_end_of_a_stream() -> None:
    size, took = 1_000_000, []
    async with echo() as port:
        with ImpairedLink(port, Conditions(bandwidth=2_500_000)) as link:
            for _ in range(3):
                reader, writer = await asyncio.open_connection("127.0.0.1", link.port)
                begun = time.perf_counter()
                writer.write(bytes(size))
                writer.write_eof()
                # Everything comes back, and its end.
                assert len(await reader.read(-1)) == size
                took.append(time.perf_counter() - begun)
                writer.close()
    assert min(took) == pytest.approx(0.4, rel=0.2)


async def test_many_connections_at_once() -> None:
    async with echo() as port:
        with ImpairedLink(port, Conditions(delay=0.02)) as link:
            begun = time.perf_counter()
            every = await asyncio.gather(*(round_trips(link.port, 2) for _ in range(50)))
            # One after the other they would take 4 s.
            assert time.perf_counter() - begun < 2
            assert min(map(min, every)) >= 0.04
            assert link.connections == 50


async def test_a_stall_delays_and_loses_nothing() -> None:
    async with echo() as port:
        with ImpairedLink(port) as link:
            reader, writer = await asyncio.open_connection("127.0.0.1", link.port)
            link.stall(0.3)
            begun = time.perf_counter()
            for part in (b"one ", b"two"):
                writer.write(part)
            assert await reader.readexactly(7) == b"one two"
            assert 0.3 <= time.perf_counter() - begun < 0.8
            writer.close()


async def test_refusal_lasts_as_long_as_it_should() -> None:
    async with echo() as port:
        with ImpairedLink(port) as link:
            reader, writer = await asyncio.open_connection("127.0.0.1", link.port)
            writer.write(b".")
            await reader.readexactly(1)
            link.refuse(0.3)
            begun = time.perf_counter()
            with pytest.raises(ConnectionError):
                await reader.readexactly(1)
            writer.close()
            refused = 0
            while time.perf_counter() - begun < 5:
                try:
                    assert len(await round_trips(link.port, 1)) == 1
                    break
                except ConnectionRefusedError:
                    refused += 1
                    await asyncio.sleep(0.02)
            assert refused > 1
            assert 0.3 <= time.perf_counter() - begun < 1.3


async def test_a_server_that_is_not_there() -> None:
    async with echo() as port:
        pass
    with ImpairedLink(port) as link:
        reader, writer = await asyncio.open_connection("127.0.0.1", link.port)
        with pytest.raises(ConnectionError):
            await reader.readexactly(1)
        writer.close()


async def healthy(stub: health_pb2_grpc.HealthStub) -> bool:
    """Whether a call works. The first one after a cut may still get the broken connection."""
    request = health_pb2.HealthCheckRequest()
    try:
        answer = await stub.Check(request, wait_for_ready=True, timeout=10)
    except grpc.aio.AioRpcError:
        return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


async def test_a_cut_breaks_a_grpc_stream_and_the_next_one_works() -> None:
    server = grpc.aio.server()
    servicer = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    serving = health_pb2.HealthCheckResponse.SERVING
    await servicer.set("", serving)
    request = health_pb2.HealthCheckRequest()
    try:
        with ImpairedLink(port, Conditions(delay=0.002)) as link:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{link.port}") as channel:
                stub = health_pb2_grpc.HealthStub(channel)
                watch = stub.Watch(request)
                assert (await watch.read()).status == serving
                link.cut()
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await watch.read()
                assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
                async with asyncio.timeout(10):
                    while True:
                        if await healthy(stub):
                            break
                        await asyncio.sleep(0.02)
                assert link.connections >= 2
    finally:
        await server.stop(None)


# The closed forms.


def test_lengths() -> None:
    assert expected_length(1.0, 5) == 6
    assert expected_length(0.0, 5) == 1
    assert expected_length(0.5, 2) == pytest.approx(1.75)
    # Of 10 rounds 6 accept the first token, 3 the second: 9 of 16 that were reached.
    assert mean_alpha([6, 3], [10, 10]) == pytest.approx(9 / 16)
    assert mean_alpha([], []) is None


def test_speeds() -> None:
    costs = Costs(step=10, draft=4, verify=12, draft_rtt=6, verify_rtt=2, overhead=2)
    assert plain_speed(10, 10) == 0.5
    assert synchronous_speed(2.6, costs) == pytest.approx(2.6 * 10 / 26)
    # The verdict takes 12 + 2 + 1, the proposal 4 + 6 + 1.
    assert overlapped_speed(3.0, costs, 1.0) == pytest.approx(2.0)
    assert overlapped_speed(3.0, costs, 0.5) == pytest.approx(3 * 10 / (7.5 + 13))


@pytest.mark.parametrize("hit_rate", [0.0, 0.3, 1.0])
def test_the_overlapped_round_is_the_mean_over_rounds(hit_rate: float) -> None:
    rng = np.random.default_rng(1)
    costs = Costs(step=10, draft=9, verify=11, draft_rtt=20)
    took = np.where(rng.random(200_000) < hit_rate, max(11, 29), 40)
    simulated = 2.0 * costs.step / took.mean()
    assert overlapped_speed(2.0, costs, hit_rate) == pytest.approx(simulated, rel=0.01)


# The sweep.


def of_cell(rate: float, **fields: float) -> Sample:
    times = {"round_ms": 10.0, "draft_ms": 2.0, "verify_ms": 10.0, "wire_ms": 1.0, "queue_ms": 0.0}
    counts = {"hits": 0, "misses": 0, "rounds": 10, "fallback_rounds": 0}
    return Sample(rate, **{**times, "tau": 2.0, "alpha": 0.5, **counts, **fields})  # type: ignore[arg-type]


def test_cells_that_are_one_are_measured_once() -> None:
    found = list(
        network_cells.cells(
            temperatures=[0.0, 1.0],
            rules=["coupled", "rejection"],
            ks=[0, 3],
            topks=[1, 2],
            run_aheads=[0, 8],
            rtts=[0.0, 10.0],
        )
    )
    assert len(set(found)) == len(found)
    # Greedy: plain, and topk × run-ahead. At temperature 1 REJECTION has chains only.
    assert len([cell for cell in found if cell.temperature == 0]) == 2 * (1 + 4)
    assert len([cell for cell in found if cell.temperature == 1]) == 2 * (1 + 4 + 2)


def test_requests_of_cells_fix_what_is_drafted() -> None:
    prompt = Prompt("1", "chat", "Hello")
    cell = Cell(1.0, "rejection", 3, 1, 8, 5.0)
    message = cell.request(prompt, 16, 7, "salt")
    assert message.speculation.HasField("adaptive")
    assert not message.speculation.adaptive
    assert message.speculation.num_draft_tokens == 3
    assert message.speculation.run_ahead == 8
    assert message.speculation.acceptance_rule == network_cells.RULES["rejection"]
    plain = Cell(1.0, "plain", 0, 1, 0, 5.0).request(prompt, 16, 7, "salt")
    assert not plain.speculation.enabled


def test_predictions_are_those_of_the_costs_at_the_smallest_round_trip() -> None:
    plain, far = Cell(0.0, "plain", 0, 1, 0, 0.0), Cell(0.0, "plain", 0, 1, 0, 10.0)
    waits, ahead = Cell(0.0, "greedy", 1, 1, 0, 0.0), Cell(0.0, "greedy", 1, 1, 8, 10.0)
    found = network_cells.predictions(
        {
            plain: of_cell(100.0),
            far: of_cell(50.0),
            waits: of_cell(150.0),
            ahead: of_cell(70.0, tau=1.5, draft_ms=99.0, hits=1, misses=1),
        },
        {0.0: (0.0, 0.0), 10.0: (10.0, 10.0)},
    )
    assert found[plain].from_tau == pytest.approx(100)
    assert found[far].from_tau == pytest.approx(50)
    assert found[waits].from_tau == pytest.approx(1000 * 2 / 13)
    # A hit takes 10 + 10 + 0.5, a miss 12.5 more.
    assert found[ahead].from_tau == pytest.approx(1000 * 1.5 / (20.5 + 12.5 / 2))
    assert found[ahead].from_alpha == pytest.approx(found[ahead].from_tau)


# The simulator: logs whose answers are known.

M, V = 4000, 8


def made(p: Floats, q: Floats, tokens: np.ndarray, temperature: float = 1.0) -> DistributionLog:
    """One text, and the same order of ids in no two places."""
    rng = np.random.default_rng(5)
    p_ids, q_ids = (rng.permuted(np.tile(np.arange(V), (len(tokens), 1)), axis=1) for _ in "pq")
    rows = np.arange(len(tokens))[:, None]
    return DistributionLog(
        temperature=temperature,
        tokens=tokens.astype(np.int32),
        begins=np.array([0, len(tokens)], np.int32),
        p_ids=p_ids.astype(np.int32),
        p=np.log(p)[rows, p_ids],
        q_ids=q_ids.astype(np.int32),
        q=np.log(q)[rows, q_ids],
    )


def sampled(same: bool, *, temperature: float = 1.0) -> tuple[DistributionLog, Floats, Floats]:
    """The same p and q in every context, and a text that was sampled from p."""
    rng = np.random.default_rng(3)
    p, q = rng.dirichlet(np.ones(V), size=2)
    q = p if same else q
    at = p ** (1 / temperature)
    tokens = rng.choice(V, size=M, p=at / at.sum())
    return made(np.tile(p, (M, 1)), np.tile(q, (M, 1)), tokens, temperature), p, q


def coupled_alpha(p: Floats, q: Floats) -> float:
    """P(argmax log p + g = argmax log q + g), in closed form."""
    ratios = np.maximum(p[None, :] / p[:, None], q[None, :] / q[:, None])
    return float((1 / ratios.sum(axis=1)).sum())


def drawn(log: DistributionLog, rule: str, trials: int = 10) -> list[Draws]:
    rng = np.random.default_rng(11)
    pair = coupled_noise.pair_of(log)
    return [coupled_noise.draws(pair, rule, rng) for _ in range(trials)]


def deviations(found: list[Draws], expected: float) -> float:
    """How many standard deviations the acceptance rate is off. The texts are one sample of M."""
    rate = float(np.mean([one.stands.mean() for one in found]))
    return float(abs(rate - expected) / np.sqrt(expected * (1 - expected) / M))


def test_the_closed_form_of_coupling_by_brute_force() -> None:
    _, p, q = sampled(False)
    noise = np.random.default_rng(2).gumbel(size=(200_000, V))
    same = (np.log(p) + noise).argmax(1) == (np.log(q) + noise).argmax(1)
    assert same.mean() == pytest.approx(coupled_alpha(p, q), abs=0.005)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_acceptance_given_the_text_is_that_of_the_rules(temperature: float) -> None:
    log, p, q = sampled(False, temperature=temperature)
    p, q = p ** (1 / temperature), q ** (1 / temperature)
    p, q = p / p.sum(), q / q.sum()
    assert deviations(drawn(log, COUPLED), coupled_alpha(p, q)) < 4
    assert deviations(drawn(log, REJECTION), float(np.minimum(p, q).sum())) < 4


def test_noise_that_is_not_shared_is_caught() -> None:
    log, p, q = sampled(False)
    rng = np.random.default_rng(0)
    pair = coupled_noise.pair_of(log)
    wrong = [
        coupled_noise.draws(
            pair, COUPLED, rng, lambda random, log_p, _: coupled_noise.gumbel(random, log_p.shape)
        )
        for _ in range(10)
    ]
    assert deviations(wrong, coupled_alpha(p, q)) > 10
    assert deviations(wrong, float((p * q).sum())) < 4


def test_ranks_given_the_text_are_those_of_brute_force() -> None:
    log, p, q = sampled(False)
    pair, found = coupled_noise.pair_of(log), drawn(log, COUPLED)
    assert len(pair.place) == M
    noise = np.random.default_rng(4).gumbel(size=(100_000, V))
    y, scores = (np.log(p) + noise).argmax(1), np.log(q) + noise
    before = (scores > scores[np.arange(len(y)), y][:, None]).sum(1)
    for rank in range(4):
        simulated = np.mean([(one.bonus_ranks[SHARED] == rank).mean() for one in found])
        assert simulated == pytest.approx((before == rank).mean(), abs=0.02)
        # Where the draft was wrong its own token is no guess.
        wrong = [one.ranks[SHARED][~one.stands] == rank for one in found]
        expected = (before[before > 0] == rank + 1).mean()
        assert np.concatenate(wrong).mean() == pytest.approx(expected, abs=0.03)


@pytest.mark.parametrize("k", [1, 3, 8])
def test_a_draft_that_is_the_target_always_hits(k: int) -> None:
    log, _, _ = sampled(True)
    rounds = rounds_of(log, drawn(log, COUPLED, 2), k)
    assert rounds.length == k + 1
    assert rounds.by_position() == [1.0] * k
    one = allocation(rounds.shares(), 1, 1.0)
    assert one.tolist() == [0] * k + [1]
    assert rounds.hit_rate(SHARED, one) == 1.0
    # Noise of its own tells the draft nothing.
    assert rounds.hit_rate(FRESH, one) < 0.9
    assert rounds_of(log, drawn(log, REJECTION, 2), k).length == k + 1


def test_greedy_rounds_by_hand() -> None:
    """The draft's second choice is right at every third place, its first elsewhere."""
    p = np.full((9, V), 0.01)
    q = np.full((9, V), 0.01)
    tokens = np.arange(9) % V
    for place, token in enumerate(tokens):
        p[place, token] = 0.9
        q[place, token] = 0.5
        if place % 3 == 2:
            q[place, (token + 1) % V] = 0.6
    log = made(p, q, tokens, temperature=0.0)
    rounds = rounds_of(log, drawn(log, GREEDY, 1), 3)
    assert rounds.accepted.tolist() == [2, 2]
    assert rounds.by_position() == [1.0, 1.0, 0.0]
    assert rounds.hit_rate(PLAIN, np.array([0, 0, 1, 0])) == 1.0
    assert rounds.hit_rate(PLAIN, np.array([9, 9, 0, 9])) == 0.0
    # Two tokens side by side have the right one always.
    contexts = Contexts(coupled_noise.pair_of(log), drawn(log, GREEDY, 1)[0], beta=1.0)
    assert contexts.rank.tolist() == [0, 0, 1] * 3
    assert tree_length_of(log, contexts, 2, 1) == pytest.approx(3)
    assert contexts.best_tree(2, 9, 2, 2) == (1, 1)
    assert contexts.best_tree(2, 9, 2, 1) == (0, 2)


def test_allocations_are_whole_and_complete() -> None:
    shares = np.array([0.5, 0.25, 0.125, 0.125])
    assert allocation(shares, 8, 0.0).tolist() == [4, 2, 1, 1]
    spread = allocation(shares, 16, 1.0)
    assert spread.sum() == 16
    assert all(more >= less for more, less in pairwise(spread))
    assert spread[0] < 8


# Trees.


def tree_length_of(log: DistributionLog, contexts: Contexts, rows: int, width: int) -> float:
    return 1 + statistics.fmean(tree.accepted for tree in trees_of(log, contexts, rows, width))


def test_a_tree_of_width_one_is_a_chain() -> None:
    log, _, _ = sampled(False)
    found = drawn(log, COUPLED, 1)
    contexts = Contexts(coupled_noise.pair_of(log), found[0], beta=1.0)
    for rows in (1, 3, 5):
        assert tree_length_of(log, contexts, rows, 1) == rounds_of(log, found, rows).length
    # More to choose from is no worse.
    assert tree_length_of(log, contexts, 5, 4) > 1.1 * tree_length_of(log, contexts, 5, 1)


def test_beta_is_found() -> None:
    rng = np.random.default_rng(9)
    scores = rng.normal(size=(20_000, 6))
    for beta in (0.5, 2.0):
        noise = rng.gumbel(size=scores.shape)
        place = (beta * scores + noise).argmax(1)
        assert fitted_beta(scores, place) == pytest.approx(beta, rel=0.05)
    assert fitted_beta(scores, scores.argmax(1)) > 60


def test_a_draft_without_the_token_never_guesses_it() -> None:
    log, _, _ = sampled(False)
    q = log.q.copy()
    q[log.q_ids == 0] = -np.inf
    few = DistributionLog(**{**vars(log), "q": q})
    for rule in (COUPLED, REJECTION):
        one = drawn(few, rule, 1)[0]
        missing = few.tokens == 0
        assert missing.any()
        assert not one.stands[missing].any()
        assert all((ranks[missing] == coupled_noise.NEVER).all() for ranks in one.ranks.values())
    contexts = Contexts(coupled_noise.pair_of(few), drawn(few, COUPLED, 1)[0], beta=1.0)
    assert np.isfinite(contexts.profile).all()


# The commands.


def test_a_log_survives_its_file(tmp_path: Path) -> None:
    log, _, _ = sampled(False)
    log.write(tmp_path / "log.npz")
    read = DistributionLog.read(tmp_path / "log.npz")
    assert read.temperature == 1.0
    assert (read.q_ids == log.q_ids).all()
    assert np.abs(read.q - log.q).max() < 0.01


def test_simulators_print_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from benchmarks import run_ahead_simulator

    file = tmp_path / "log.npz"
    log, _, _ = sampled(False)
    DistributionLog(**{**vars(log), "begins": np.array([0, 2000, M], np.int32)}).write(file)
    options = ("--trials", "2", "--json", str(tmp_path / "out.json"))
    run_ahead_simulator.main([str(file), "--num-draft-tokens", "2", *options])
    assert "hit rates" in capsys.readouterr().out
    tree_simulator.main([str(file), "--rows", "2,4", "--width", "1,2", *options])
    assert "β = " in capsys.readouterr().out


def test_the_recorder_with_the_target_as_its_own_draft(target_folder: Path, tmp_path: Path) -> None:
    from benchmarks import distribution_recorder

    folder = str(target_folder)
    distribution_recorder.main(
        [
            *("--target", folder, "--draft", folder, "--dtype", "float32"),
            *("--prompts", "3", "--tokens", "24", "--temperature", "0,1", "--out", str(tmp_path)),
        ]
    )
    greedy = DistributionLog.read(tmp_path / "distributions-0.npz")
    assert (greedy.p_ids[:, 0] == greedy.tokens).all()
    log = DistributionLog.read(tmp_path / "distributions-1.npz")
    assert (log.p == log.q).all()
    assert len(list(log.texts())) == 3
    # Among 300 tokens 256 are nearly all.
    assert np.exp(log.p).sum(axis=1).min() > 0.9
    assert rounds_of(log, drawn(log, COUPLED, 1), 3).length == 4
    # What was written is a sample of what was recorded.
    places = (log.p_ids == log.tokens[:, None]).argmax(axis=1)
    surprise = -log.p[np.arange(len(places)), places]
    entropy = -(np.exp(log.p) * log.p).sum(axis=1)
    assert surprise.mean() == pytest.approx(entropy.mean(), rel=0.3)


@pytest.mark.slow
def test_the_sweep(target_folder: Path, draft_folder: Path, tmp_path: Path) -> None:
    from benchmarks import network

    models = ("--target", str(target_folder), "--draft", str(draft_folder), "--dtype", "float32")
    work = ("--prompts", "2", "--kinds", "chat", "--tokens", "16", "--repeats", "2")
    cells = ("--rtt", "0,20", "--num-draft-tokens", "0,2", "--temperature", "0", "--run-ahead")
    network.main([*models, *work, *cells, "0,4", "--out", str(tmp_path)])
    document = json.loads((tmp_path / "network.json").read_text())
    found = {
        (one["cell"]["k"], one["cell"]["run_ahead"], one["cell"]["rtt"]): one
        for one in document["cells"]
    }
    assert len(found) == 6
    rates = {key: one["medians"]["tokens_per_second"] for key, one in found.items()}
    # A step of the tiny target is nothing beside 20 ms.
    assert rates[0, 0, 20.0] == pytest.approx(1000 / 20, rel=0.4)
    assert rates[0, 0, 0.0] > 2 * rates[0, 0, 20.0]
    waiting = found[2, 0, 20.0]["medians"]
    assert waiting["wire_ms"] > 20
    assert waiting["round_ms"] > 40
    assert {path.name for path in tmp_path.glob("*.png")} == {
        "rtt-T0-greedy.png",
        "run-ahead-T0-greedy.png",
    }
