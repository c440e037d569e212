"""The supervisor behind `specdec up`: child processes that start, die and end."""

from __future__ import annotations

import asyncio
import signal
import socket
from pathlib import Path
from typing import Any

import pytest

from specdec import services
from specdec.cli.supervisor import Child, ServiceDied, running
from tests.stack import free_port


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes a child whose program is given."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    header = (
        "import json, os, signal, sys, time\n"
        "def log(event, **more): print(json.dumps({'event': event, **more}), file=sys.stderr)\n"
    )

    def make(program: str) -> Child:
        (tmp_path / "fake_service.py").write_text(header + program)
        return Child(services.DRAFT, "fake_service", free_port(), ())

    return make


async def test_a_child_that_dies_is_named_with_its_reason_and_started_again(fake: Any) -> None:
    child = fake(
        "print('a warning of long ago', file=sys.stderr)\n"
        "log('ready')\n"
        "time.sleep(0.5)\n"
        "sys.exit(3)\n"
    )
    reported: asyncio.Queue[str] = asyncio.Queue()
    async with running([child], lambda service, line: reported.put_nowait(line)):
        lines = [await asyncio.wait_for(reported.get(), 10) for _ in range(3)]
        assert lines[:2] == ["ready", "died (exit 3); starting it again in 1 s"]
        assert lines[2] == "ready"
        assert child.process is not None
        child.process.kill()
        line = await asyncio.wait_for(reported.get(), 10)
        assert line == "died (killed by SIGKILL); starting it again in 2 s"
    assert child.process.returncode is not None


async def test_a_child_may_print_a_line_without_end(fake: Any) -> None:
    # As progress bars do that are redrawn a thousand times.
    child = fake(
        "sys.stderr.write('\\r50% of the model' * 20_000)\n"
        "sys.stderr.write('x' * 1_000_000 + '\\n')\n"
        "log('ready')\n"
        "time.sleep(60)\n"
    )
    async with asyncio.timeout(20), running([child], lambda *_: None):
        assert child.ready.is_set()


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        ("sys.exit('error: no such model')", "exit 1: no such model"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "killed by SIGKILL"),
    ],
)
async def test_a_child_that_cannot_start_is_named_with_its_last_words(
    fake: Any, end: str, reason: str
) -> None:
    child = fake(f"print('Loading: 10%', file=sys.stderr, flush=True)\n{end}\n")
    with pytest.raises(ServiceDied) as died:
        async with running([child], lambda *_: None):
            pass
    assert str(died.value) == f"the draft could not start ({reason})"


async def test_a_gateway_counts_as_ready_once_it_has_found_its_peers(fake: Any) -> None:
    child = fake(
        "log('peer', peer='verifier', state='READY', reason='')\n"
        "log('ready')\n"
        "time.sleep(0.3)\n"
        "log('peer', peer='draft', state='CONNECTING', reason='lost')\n"
        "time.sleep(0.3)\n"
        "log('peer', peer='draft', state='READY', reason='')\n"
        "time.sleep(60)\n"
    )
    child.service, child.peers = services.GATEWAY, frozenset({"verifier", "draft"})
    lines: list[str] = []
    async with asyncio.timeout(20), running([child], lambda _, line: lines.append(line)):
        assert lines == ["verifier: connected", "ready", "draft: lost", "draft: connected"]


async def test_a_port_in_use_ends_the_start_with_the_services_reason() -> None:
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = busy.getsockname()[1]
        child = Child(services.GATEWAY, "gateway", port, ())
        with pytest.raises(ServiceDied, match=f"the gateway could not start .*{port}.* in use"):
            async with running([child], lambda *_: None):
                pass


async def test_a_child_that_will_not_end_is_killed_when_asked_again(fake: Any) -> None:
    child = fake("signal.signal(signal.SIGTERM, signal.SIG_IGN)\nlog('ready')\ntime.sleep(60)\n")

    async def stay() -> None:
        async with running([child], lambda *_: None) as keeper:
            await keeper

    task = asyncio.create_task(stay())
    await asyncio.wait_for(child.ready.wait(), 10)
    task.cancel()
    await asyncio.wait({task}, timeout=0.5)
    assert not task.done()
    task.cancel()
    await asyncio.wait({task}, timeout=5)
    assert task.cancelled()
    assert child.process.returncode == -signal.SIGKILL
