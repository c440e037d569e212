"""`specdec up` and `specdec demo` as processes: what they start, say and leave behind."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from specdec.models.cache import DEFAULT_TARGET_NAME
from tests.cli import (
    PROMPT,
    Run,
    environment,
    specdec,
    started,
)
from tests.models import make_model, permuted_tokens
from tests.stack import free_port


def left_running(*ports: int) -> list[str]:
    """The command lines of processes that were started for any of these ports."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = file.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if any(re.search(rf"--port {port} ", line) for port in ports):
            found.append(f"{file.parent.name} {line}")
    return found


class Lines:
    """The output of a running command, read as it comes."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        self._stream = process.stdout
        self.seen: list[str] = []

    async def until(self, pattern: str) -> str:
        """Reads on to a line that matches."""
        async with asyncio.timeout(60):
            while line := (await self._stream.readline()).decode():
                self.seen.append(line.rstrip("\n"))
                if re.search(pattern, line):
                    return self.seen[-1]
        raise AssertionError(f"no {pattern!r} in {self.seen}")


async def interrupted(process: asyncio.subprocess.Process) -> Run:
    """Ends a command as Ctrl-C does. Gives what it said after that."""
    process.send_signal(signal.SIGINT)
    out, err = await asyncio.wait_for(process.communicate(), 30)
    return Run(process.returncode, (out or b"").decode(), (err or b"").decode())


@dataclass
class Ports:
    """Of one pair of services."""

    gateway: int
    draft: int
    verifier: int

    def flags(self) -> tuple[str, ...]:
        return (
            *("--gateway-port", str(self.gateway), "--draft-port", str(self.draft)),
            *("--verifier-port", str(self.verifier)),
        )

    def left_running(self) -> list[str]:
        return left_running(self.gateway, self.draft, self.verifier)


@pytest.fixture
def ports() -> Ports:
    return Ports(free_port(), free_port(), free_port())


@pytest.mark.slow
async def test_up_keeps_the_services_up_until_ctrl_c(
    target_folder: Path, draft_folder: Path, ports: Ports
) -> None:
    address = f"127.0.0.1:{ports.gateway}"
    command = ("up", "--target", target_folder, "--draft", draft_folder, "--dtype", "float32")

    async def generate(count: int) -> dict[str, Any]:
        run = await specdec(
            *("generate", "--json", "--address", address, "--temperature", "0", "--ignore-eos"),
            *("--max-new-tokens", str(count), PROMPT),
        )
        assert run.status == 0, run.err
        answer: dict[str, Any] = json.loads(run.out)
        return answer

    async with started(*command, *ports.flags()) as process:
        lines = Lines(process)
        ready = await lines.until("^Ready")
        assert ready == f'Ready. Try: specdec generate --address {address} "Once upon a time"'
        start = "\n".join(lines.seen)
        for name, port in vars(ports).items():
            assert re.search(rf"^{name} +listening on 127\.0\.0\.1:{port}\b", start, re.MULTILINE)
        for name in ("draft", "verifier"):
            assert re.search(rf"^{name} +ready after \d+\.\d s: float32 on cpu$", start, re.M)
            assert re.search(rf"^gateway +{name}: connected$", start, re.M)
        healthy = await specdec(
            *("health", "--gateway", address, "--draft", f"127.0.0.1:{ports.draft}"),
            *("--verifier", f"127.0.0.1:{ports.verifier}"),
        )
        assert healthy.status == 0, healthy.out

        # The draft is used from the first generation on.
        first = await generate(100)
        assert first["speculation"]["num_draft_tokens"] > 0
        assert first["speculation"]["fallback_rounds"] == 0

        [draft_line] = left_running(ports.draft)
        os.kill(int(draft_line.split()[0]), signal.SIGKILL)
        without = await generate(100)
        assert without["token_ids"] == first["token_ids"]
        assert without["speculation"]["fallback_rounds"] > 0
        died = await lines.until("^draft .*died")
        assert died.endswith("died (killed by SIGKILL); starting it again in 1 s")
        await lines.until("^draft +ready after")
        await lines.until("^gateway +draft: connected")
        again = await generate(100)
        assert again["token_ids"] == first["token_ids"]
        assert again["speculation"]["num_draft_tokens"] > 0
        assert again["speculation"]["fallback_rounds"] == 0

        end = await interrupted(process)
        assert end.status == 0
        assert end.err == ""
        assert end.out.endswith("stopped\n")
        assert "Traceback" not in "\n".join(lines.seen) + end.out
        assert "died" not in end.out
    assert ports.left_running() == []


@pytest.mark.slow
async def test_up_lets_calls_finish_unless_ctrl_c_comes_again(tmp_path: Path, ports: Ports) -> None:
    model = make_model(tmp_path / "model", seed=1, rows=300, context=20_000)
    command = ("up", "--target", model, "--dtype", "float32")
    async with started(*command, *ports.flags()) as process:
        lines = Lines(process)
        await lines.until("^There is no --draft, so every token is decoded plainly")
        address = f"127.0.0.1:{ports.gateway}"
        async with started(
            *("generate", PROMPT, "--ignore-eos", "--max-new-tokens", "19000"),
            *("--address", address),
        ) as call:
            assert call.stdout is not None
            assert await asyncio.wait_for(call.stdout.read(1), 30)
            process.send_signal(signal.SIGINT)
            await lines.until("^stopping")
            await asyncio.sleep(0.5)
            assert process.returncode is None
            assert call.returncode is None
            begun = time.monotonic()
            end = await interrupted(process)
            assert time.monotonic() - begun < 5
            assert (end.status, end.out, end.err) == (0, "stopped\n", "")
            _, err = await asyncio.wait_for(call.communicate(), 30)
            assert call.returncode == 1
            assert err.startswith(b"error: "), err
    assert ports.left_running() == []


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
async def test_up_ends_while_it_starts(
    target_folder: Path, ports: Ports, number: signal.Signals
) -> None:
    command = ("up", "--target", target_folder, "--draft", target_folder)
    async with started(*command, *ports.flags()) as process:
        await Lines(process).until("^gateway +listening")
        process.send_signal(number)
        out, err = await asyncio.wait_for(process.communicate(), 30)
        assert (process.returncode, err) == (0, b"")
        assert out.endswith(b"stopped\n")
    assert ports.left_running() == []


@pytest.mark.slow
async def test_up_survives_that_nobody_reads_its_output(target_folder: Path, ports: Ports) -> None:
    command = ("up", "--target", target_folder)
    read, write = os.pipe()
    async with started(*command, *ports.flags(), stdout=write) as process:
        os.close(write)
        os.close(read)
        wait = ("health", "gateway", "--gateway", f"127.0.0.1:{ports.gateway}", "--wait", "60")
        assert (await specdec(*wait)).status == 0
        assert (await interrupted(process)).status == 0
    assert ports.left_running() == []


@pytest.mark.slow
async def test_up_without_a_model_names_the_service_and_leaves_nothing(
    target_folder: Path, tmp_path: Path, ports: Ports
) -> None:
    missing = tmp_path / "missing"
    run = await specdec("up", "--target", target_folder, "--draft", missing, *ports.flags())
    assert run.status == 1
    assert re.fullmatch(r"error: the draft could not start \(exit 1: [^\n]+\)\n", run.err)
    assert str(missing) in run.err
    assert "Traceback" not in run.out
    assert ports.left_running() == []


@pytest.mark.slow
async def test_up_with_a_draft_that_needs_no_model(target_folder: Path, ports: Ports) -> None:
    command = ("up", "--target", target_folder, "--drafters", "lookup,suffix")
    async with started(*command, *ports.flags()) as process:
        lines = Lines(process)
        await lines.until("^Ctrl-C stops all three")
        assert re.search("^draft +ready: lookup, suffix$", "\n".join(lines.seen), re.MULTILINE)
        run = await specdec(
            *("generate", "--json", "--address", f"127.0.0.1:{ports.gateway}", "--ignore-eos"),
            *("--temperature", "0", "--max-new-tokens", "40", "again and again and again and"),
        )
        assert json.loads(run.out)["speculation"]["num_draft_tokens"] > 0
        assert (await interrupted(process)).status == 0
    assert ports.left_running() == []


@pytest.mark.slow
async def test_up_translates_the_drafts_of_a_model_with_another_tokenizer(
    tmp_path: Path, target_folder: Path, ports: Ports
) -> None:
    table = permuted_tokens(300)
    draft = make_model(tmp_path / "other", seed=5, rows=300, table=table)
    command = ("up", "--target", target_folder, "--draft", draft, "--translate")
    async with started(*command, *ports.flags()) as process:
        lines = Lines(process)
        await lines.until("^Ctrl-C stops all three")
        run = await specdec(
            *("generate", "--json", "--address", f"127.0.0.1:{ports.gateway}", "--ignore-eos"),
            *("--temperature", "0", "--max-new-tokens", "40", "again and again"),
        )
        assert json.loads(run.out)["speculation"]["num_draft_tokens"] > 0
        assert (await interrupted(process)).status == 0
    assert ports.left_running() == []


async def test_up_wants_a_draft_to_translate(target_folder: Path) -> None:
    run = await specdec("up", "--target", target_folder, "--translate")
    assert run.status == 2
    assert "name the --draft that has another tokenizer" in run.err


async def test_up_wants_a_draft_for_the_model_among_the_drafters(target_folder: Path) -> None:
    run = await specdec("up", "--target", target_folder, "--drafters", "lookup,model")
    assert run.status == 2
    assert "name the --draft that is the model" in run.err


@pytest.mark.slow
async def test_up_with_an_unknown_drafter_names_those_that_are_known(
    target_folder: Path, ports: Ports
) -> None:
    command = ("up", "--target", target_folder, "--drafters", "loopup")
    run = await specdec(*command, *ports.flags())
    assert run.status == 1
    assert "there is no drafter 'loopup'; there are lookup, model, suffix" in run.err


async def test_up_with_a_port_in_use_names_the_service_and_the_flag(
    target_folder: Path, ports: Ports
) -> None:
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", ports.draft))
        busy.listen()
        command = ("up", "--target", target_folder, "--draft", target_folder)
        error = (await specdec(*command, *ports.flags())).error
        assert error.startswith(f"the draft cannot listen on 127.0.0.1:{ports.draft} (")
        assert "--draft-port" in error
    ports.verifier = ports.draft
    assert "--verifier-port" in (await specdec(*command, *ports.flags())).error
    assert ports.left_running() == []


async def test_up_without_the_default_model_says_how_to_get_it(tmp_path: Path) -> None:
    error = (await specdec("up", SPECDEC_CACHE_DIR=str(tmp_path))).error
    assert "`specdec models pull`" in error


@pytest.fixture
def pulled(tmp_path: Path, target_folder: Path) -> Path:
    """A cache with a tiny model in place of the default one, which has 30 layers too."""
    folder = tmp_path / "models" / DEFAULT_TARGET_NAME
    config = LlamaConfig.from_pretrained(target_folder, num_hidden_layers=30)
    LlamaForCausalLM(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(target_folder).save_pretrained(folder)
    return tmp_path


def demo_ports(lines: list[str]) -> list[int]:
    return [int(m[1]) for line in lines if (m := re.search(r"listening on .*?:(\d+)", line))]


@pytest.mark.slow
async def test_demo_shows_one_answer_and_leaves_nothing(pulled: Path, draft_folder: Path) -> None:
    run = await specdec(
        *("demo", "--prompt", "[bold]hello", "--max-new-tokens", "8"),
        SPECDEC_CACHE_DIR=str(pulled),
        SPECDEC_DRAFT_MODEL=str(draft_folder),
    )
    assert (run.status, run.err) == (0, ""), run
    assert "\n[bold]hello\n" in run.out
    assert re.search(r"^\d tokens? in .* rounds?, accepted \d+ of \d+ drafted", run.out, re.M)
    assert "without draft" not in run.out
    ports = demo_ports(run.out.splitlines())
    assert len(ports) == 3
    assert left_running(*ports) == []


@pytest.mark.slow
async def test_ctrl_c_ends_a_demo_that_starts(pulled: Path, draft_folder: Path) -> None:
    async with started(
        "demo",
        env=environment(SPECDEC_CACHE_DIR=str(pulled), SPECDEC_DRAFT_MODEL=str(draft_folder)),
    ) as process:
        lines = Lines(process)
        await lines.until("^gateway +listening")
        end = await interrupted(process)
        assert (end.status, end.err) == (130, "")
        assert "Traceback" not in end.out
    assert left_running(*demo_ports(lines.seen + end.out.splitlines())) == []
