"""The three services under load for long: nothing that they hold grows."""

from __future__ import annotations

import asyncio
import os
import random
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import grpc
import pytest

from specdec.cli.health import wait_until_ready
from specdec.services import DRAFT, GATEWAY, VERIFIER
from specdec.v1 import gateway_pb2_grpc
from tests.faults.disturbance import Victim, addresses, victims
from tests.faults.storm import LONG
from tests.stack import Gateway, free_port

SECONDS = 600.0 if LONG else 12.0
CLIENTS = 12
GROWTH_BYTES = (8 if LONG else 16) * 2**20
"""How much a service may grow from the middle third to the last. What would be kept of each session
is far more: they are thousands in the long form."""


class Held(NamedTuple):
    """What a process holds."""

    bytes: int
    files: int
    threads: int


def held(pid: int) -> Held:
    proc = Path(f"/proc/{pid}")
    pages = int((proc / "statm").read_text().split()[1])
    return Held(
        pages * os.sysconf("SC_PAGE_SIZE"),
        len(list((proc / "fd").iterdir())),
        len(list((proc / "task").iterdir())),
    )


@asynccontextmanager
async def gateway_process(found: list[Victim]) -> AsyncIterator[tuple[int, str]]:
    address = f"127.0.0.1:{free_port()}"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "gateway", "--port", address.partition(":")[2]),
        *("--verifier-address", addresses(found, VERIFIER)),
        *("--draft-address", addresses(found, DRAFT)),
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        assert await wait_until_ready(GATEWAY, address, 60) is None
        yield process.pid, address
    finally:
        process.kill()
        await process.wait()


async def client(running: Gateway, seed: int, until: float) -> int:
    """Sends requests of all kinds, and leaves some half-way. Returns how many it has sent."""
    generator, sent = random.Random(seed), 0
    stub = gateway_pb2_grpc.GenerationServiceStub(running.channel)
    while time.monotonic() < until:
        request = running.request(
            [generator.randrange(300) for _ in range(generator.randint(1, 90))],
            n=generator.choice([1, 1, 3]),
            rule=generator.choice(["coupled", "rejection", "block"]),
            temperature=generator.choice([0.0, 1.0]),
            run_ahead=generator.choice([0, 3]),
            max_new_tokens=generator.randint(1, 120),
        )
        leaves_after = generator.choice([1000, 1000, 2, 9])
        call = stub.Generate(request)
        async for _ in call:
            leaves_after -= 1
            if leaves_after == 0:
                break
        call.cancel()
        sent += 1
    return sent


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 120)
async def test_nothing_that_the_services_hold_grows(
    target_folder: Path, draft_folder: Path
) -> None:
    async with (
        victims(target_folder, draft_folder, each=1) as found,
        gateway_process(found) as (gateway_pid, address),
        grpc.aio.insecure_channel(address) as channel,
    ):
        pids = [*(victim.pid for victim in found), gateway_pid]
        until = time.monotonic() + SECONDS
        running = Gateway(address, channel)
        clients = [asyncio.create_task(client(running, seed, until)) for seed in range(CLIENTS)]
        samples: list[list[Held]] = []
        while not all(task.done() for task in clients):
            samples.append([held(pid) for pid in pids])
            await asyncio.sleep(SECONDS / 60)
        sent = sum([await task for task in clients])
    third = len(samples) // 3
    for index, name in enumerate(("verifier", "draft", "gateway")):
        middle, last = samples[third : 2 * third], samples[2 * third :]
        most = [
            Held(*map(max, zip(*(s[index] for s in part), strict=True))) for part in (middle, last)
        ]
        print(f"\n{name}: {sent} requests, middle third {most[0]}, last third {most[1]}", end="")
        assert most[1].bytes - most[0].bytes < GROWTH_BYTES, name
        assert most[1].files <= most[0].files + 2, name
        assert most[1].threads <= most[0].threads + 2, name
