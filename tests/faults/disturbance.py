"""Model services that are killed, frozen and cut off at random while a gateway uses them."""

from __future__ import annotations

import asyncio
import random
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from benchmarks.impaired_link import ImpairedLink
from specdec.cli.health import wait_until_ready
from specdec.services import DRAFT, VERIFIER, Service
from tests.stack import free_port

_START_SECONDS = 120
_MODULES = {VERIFIER: "verifier_service", DRAFT: "draft_service"}


class Victim:
    """A model service in a process of its own, behind a link."""

    def __init__(self, service: Service, model: Path) -> None:
        self.service = service
        self._port = free_port()
        self._command = (
            *(sys.executable, "-m", _MODULES[service], "--model", str(model)),
            *("--port", str(self._port), "--dtype", "float32", "--num-threads", "1"),
        )
        self._link = ImpairedLink(self._port)
        self._process: asyncio.subprocess.Process | None = None

    @property
    def address(self) -> str:
        """Of its link."""
        return f"127.0.0.1:{self._link.port}"

    @property
    def pid(self) -> int:
        """Of its process."""
        assert self._process is not None
        return self._process.pid

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Runs the process and the link while the block runs."""
        with self._link:
            await self.start()
            try:
                yield
            finally:
                await self.kill()

    async def start(self) -> None:
        """Starts the process. Returns when it is ready."""
        self._process = await asyncio.create_subprocess_exec(
            *self._command, stderr=asyncio.subprocess.DEVNULL
        )
        address = f"127.0.0.1:{self._port}"
        assert await wait_until_ready(self.service, address, _START_SECONDS) is None

    async def kill(self) -> None:
        """SIGKILL."""
        assert self._process is not None
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()

    async def killed(self, seconds: float) -> None:
        """SIGKILL, and a start after so many seconds."""
        await self.kill()
        await asyncio.sleep(seconds)
        await self.start()

    async def frozen(self, seconds: float) -> None:
        """SIGSTOP for so many seconds."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        await asyncio.sleep(seconds)
        self._process.send_signal(signal.SIGCONT)

    async def cut_off(self, seconds: float) -> None:
        """Its connections are reset. For half of the time new ones are refused."""
        self._link.refuse(seconds / 2)
        await asyncio.sleep(seconds)

    async def silenced(self, seconds: float) -> None:
        """Nothing goes through, and nothing says so."""
        self._link.stall(seconds)
        await asyncio.sleep(seconds)


Fault = tuple[str, Callable[[Victim, float], Awaitable[None]], float]
"""Its name, what it does, and the most seconds that it takes."""
FAULTS: Sequence[Fault] = (
    ("killed", Victim.killed, 1.0),
    ("frozen", Victim.frozen, 3.0),
    ("cut off", Victim.cut_off, 1.0),
    ("silenced", Victim.silenced, 3.0),
)


class Disturbance:
    """Victims, and what was done to them."""

    def __init__(self, victims: Sequence[Victim], faults: Sequence[Fault], seed: int) -> None:
        self.done: Counter[str] = Counter()
        self._victims = victims
        self._kinds = [(service, fault) for service in _MODULES for fault in faults]
        self._random = random.Random(seed)

    async def go_on(self, rounds: int) -> None:
        """Inflicts one fault after the other: in each round each kind on each service."""
        kinds = [kind for _ in range(rounds) for kind in self._shuffled()]
        for service, (name, inflict, longest) in kinds:
            victim = self._random.choice([v for v in self._victims if v.service is service])
            await asyncio.sleep(self._random.uniform(0.1, 0.6))
            await inflict(victim, self._random.uniform(0.0, longest))
            self.done[f"{_MODULES[service]} {name}"] += 1

    def _shuffled(self) -> list[tuple[Service, Fault]]:
        return self._random.sample(self._kinds, len(self._kinds))


@asynccontextmanager
async def victims(target: Path, draft: Path, each: int = 2) -> AsyncIterator[list[Victim]]:
    """So many verifiers and drafts, running."""
    found = [
        Victim(service, model)
        for service, model in ((VERIFIER, target), (DRAFT, draft))
        for _ in range(each)
    ]
    async with AsyncExitStack() as stack:
        await asyncio.gather(*(stack.enter_async_context(v.running()) for v in found))
        yield found


def addresses(found: Sequence[Victim], service: Service) -> str:
    """Of the replicas of a service, as the gateway's settings have them."""
    return ",".join(victim.address for victim in found if victim.service is service)
