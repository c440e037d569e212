"""A model that is divided among processes of torchrun gives what it gives in one process."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config, LlamaConfig, Phi3Config, Qwen2Config, Qwen2ForCausalLM

from specdec import services
from specdec.cli.health import wait_until_ready
from specdec.lm import tensor_parallel
from specdec.lm.architecture import ModelLoadError
from specdec.lm.tensor_parallel import Team, check_plan, join
from specdec.v1.gateway_pb2 import LogprobsParams
from tests import stack
from tests.models import byte_tokens, make_tokenizer
from tests.test_serving import environment

ROWS = 300
BOUND = 2e-5
"""Of the difference between log-probabilities; 9e-6 was measured."""


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen2: biases, an output head that is also the embedding, four key heads."""
    folder = tmp_path_factory.mktemp("qwen2")
    config = Qwen2Config(
        vocab_size=ROWS + 4,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=0,
        tie_word_embeddings=True,
    )
    model = Qwen2ForCausalLM(config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.2 * torch.randn(weight.shape, generator=generator))
    model.save_pretrained(folder)
    make_tokenizer(byte_tokens(ROWS)).save_pretrained(folder)
    return folder


# The service in several processes.


@dataclass
class Ranks:
    """The processes of one verifier, rank 0 first."""

    address: str
    processes: list[subprocess.Popen[bytes]]
    logs: list[Path]

    async def ready(self) -> None:
        assert await wait_until_ready(services.VERIFIER, self.address, 90) is None

    async def statuses(self, seconds: float) -> list[int]:
        """Waits so long for the end of all. Returns their exit statuses."""
        ending = [asyncio.to_thread(process.wait, seconds) for process in self.processes]
        return await asyncio.gather(*ending)

    def events(self, rank: int) -> list[str]:
        """What a process logged; there must be nothing but log lines."""
        return [json.loads(line)["event"] for line in self.logs[rank].read_text().splitlines()]


@contextmanager
def torchrun(model: Path, log: Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """A verifier in two processes of torchrun; its address beside it."""
    port = stack.free_port()
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    with log.open("w") as stderr:
        started = subprocess.Popen(
            [sys.executable, "-m", *launcher, "-m", "verifier_service", *flags(model, port)],
            env=environment(),
            stderr=stderr,
        )
    try:
        yield started, f"127.0.0.1:{port}"
    finally:
        started.terminate()
        started.wait(30)


@contextmanager
def ranks(model: Path, folder: Path) -> Iterator[Ranks]:
    """A verifier in two processes, each started as torchrun does it."""
    port, meeting = stack.free_port(), stack.free_port()
    logs = [folder / f"{rank}.log" for rank in range(2)]
    processes = []
    try:
        for rank, log in enumerate(logs):
            variables = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": "2",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(meeting),
            }
            with log.open("w") as stderr:
                processes.append(
                    subprocess.Popen(
                        [sys.executable, "-m", "verifier_service", *flags(model, port)],
                        env=environment(**variables),
                        stderr=stderr,
                    )
                )
        yield Ranks(f"127.0.0.1:{port}", processes, logs)
    finally:
        for process in processes:
            process.kill()
            process.wait()


def flags(model: Path, port: int) -> list[str]:
    return [
        f"--model={model}",
        f"--port={port}",
        "--dtype=float32",
        "--num-threads=1",
        "--grace-seconds=30",
        "--kv-memory=16MiB",
    ]


PROMPTS: Sequence[Sequence[int]] = (
    range(5, 90),
    [7, 7, 200, 31],
    [250],
    [3 * i % ROWS for i in range(1, 40)],
)


async def answers(verifier_address: str, draft_address: str) -> list[stack.Result]:
    """Greedy continuations, all at once, with drafts that are sometimes right."""
    async with stack.gateway(verifier_address, draft_address) as gateway:
        await stack.drafts_are_used(gateway)
        return await asyncio.gather(
            *(
                gateway.generate(
                    prompt,
                    k=3,
                    temperature=0.0,
                    max_new_tokens=40,
                    ignore_eos=True,
                    logprobs=LogprobsParams(num_top=20, prompt=True),
                )
                for prompt in PROMPTS
            )
        )


def logprobs_of(result: stack.Result) -> list[float]:
    assert result.prompt_logprobs is not None
    found = [*result.prompt_logprobs.logprobs, *result.logprobs]
    return [value for entry in found for value in (entry.logprob, *entry.top_logprobs)]


@pytest.mark.slow
async def test_two_processes_of_torchrun_answer_as_one_and_end_together(
    model_folder: Path, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    with torchrun(model_folder, log) as (launcher, address):
        async with (
            stack.verifier(model_folder) as (alone, _),
            stack.draft(model_folder) as (draft_address, _),
        ):
            expected = await answers(alone, draft_address)
            assert await wait_until_ready(services.VERIFIER, address, 90) is None
            found = await answers(address, draft_address)
        launcher.terminate()
        await asyncio.to_thread(launcher.wait, 10)

    worst = 0.0
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.token_ids == theirs.token_ids
        assert len(ours.token_ids) == 40
        pairs = zip(logprobs_of(ours), logprobs_of(theirs), strict=True)
        worst = max(worst, *(abs(a - b) for a, b in pairs))
    assert worst <= BOUND, f"{worst:.1e}"
    assert any(result.speculation.num_accepted_tokens for result in found)

    lines = [line for line in log.read_text().splitlines() if '"event"' in line]
    events = [json.loads(line)["event"] for line in lines]
    assert events.count("ready") == events.count("loading") == 1
    assert events.count("following") == 1
    assert events.count("stopped") == 2


async def begin_generation(gateway: stack.Gateway) -> asyncio.Task[stack.Result]:
    """A generation of 100 tokens that is under way."""
    running = asyncio.create_task(
        gateway.generate([5, 6], temperature=0.0, max_new_tokens=100, ignore_eos=True)
    )
    await asyncio.sleep(0.05)
    assert not running.done()
    return running


@pytest.mark.slow
async def test_a_signal_to_all_lets_a_running_generation_complete(
    model_folder: Path, tmp_path: Path
) -> None:
    with ranks(model_folder, tmp_path) as team:
        await team.ready()
        async with stack.gateway(team.address) as gateway:
            running = await begin_generation(gateway)
            for process in team.processes:
                process.send_signal(signal.SIGTERM)
            assert len((await running).token_ids) == 100
        assert await team.statuses(5) == [0, 0]
        assert team.events(0)[-1] == "stopped"
        assert "ready" in team.events(0)
        assert team.events(1) == ["following", "stopped"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rank", "number", "statuses"),
    [
        (0, signal.SIGTERM, [0, 0]),
        (0, signal.SIGKILL, [-signal.SIGKILL, 0]),
        (1, signal.SIGKILL, [0, -signal.SIGKILL]),
    ],
)
async def test_the_end_of_one_process_is_the_end_of_all(
    rank: int, number: signal.Signals, statuses: list[int], model_folder: Path, tmp_path: Path
) -> None:
    with ranks(model_folder, tmp_path) as team:
        await team.ready()
        async with stack.gateway(team.address) as gateway:
            running = await begin_generation(gateway)
            team.processes[rank].send_signal(number)
            assert await team.statuses(20) == statuses
            await asyncio.gather(running, return_exceptions=True)
        for index, status in enumerate(statuses):
            if status == 0:
                assert team.events(index)[-1] == "stopped"


def test_an_error_that_only_one_process_has_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    statuses: list[int] = []
    monkeypatch.setattr(tensor_parallel, "_END_SECONDS", 0.1)
    monkeypatch.setattr(os, "_exit", statuses.append)
    team = object.__new__(Team)
    team._ended = Future()

    def fail() -> None:
        with team.in_step():
            raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        fail()
    assert statuses == [1]
    # The end of another process looks like an error of one's own, and is none.
    team._ended.set_result(None)
    with pytest.raises(RuntimeError, match="out of memory"):
        fail()
    assert statuses == [1]


# What keeps such a service from starting.


def config(kind: Any, **options: int) -> Any:
    return kind(hidden_size=64, num_attention_heads=8, num_hidden_layers=1, **options)


def test_a_model_that_transformers_cannot_divide_is_refused() -> None:
    with pytest.raises(ModelLoadError, match=r"'gpt2' has no tensor-parallel plan .* torchrun$"):
        check_plan(config(GPT2Config), 2)
    with pytest.raises(ModelLoadError, match=r"^2 key heads cannot be divided among 4 processes"):
        check_plan(config(LlamaConfig, num_key_value_heads=2), 4)
    check_plan(config(LlamaConfig, num_key_value_heads=2), 2)
    # Its queries, keys and values are one product, which each process has whole.
    check_plan(config(Phi3Config, num_key_value_heads=2), 4)


def test_a_device_for_all_processes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    assert join("cpu") is None
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ModelLoadError, match=r"^device 'cuda:1' cannot be used by 2 processes"):
        join("cuda:1")
