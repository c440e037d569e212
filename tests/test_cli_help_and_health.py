"""The command line, as a process: `--help` and `specdec health`."""

from __future__ import annotations

import asyncio
import re
import time
from pathlib import Path

import pytest

from specdec import services
from tests.cli import (
    specdec,
    started,
)
from tests.stack import draft, free_port, gateway, verifier

# --- Help ---------------------------------------------------------------------------------------


async def test_help_fits_a_terminal_and_says_something_of_everything() -> None:
    overview = await specdec("--help", COLUMNS="80")
    commands = ("demo", "up", "generate", "bench", "health", "draft", "verifier", "gateway")
    for command in (*commands, "models"):
        assert re.search(rf"^  {command} +\w.*\.$", overview.out, re.MULTILINE), command
    assert "..." not in overview.out.split("Commands:")[1]
    for command in ("demo", "up", "generate", "bench", "health", "models"):
        run = await specdec(command, "--help", COLUMNS="80")
        assert (run.status, run.err) == (0, "")
        assert run.out.startswith(f"Usage: specdec {command} ")
        assert max(map(len, run.out.splitlines())) <= 80
        # Every flag has a text, beside it or on the next line.
        flags = re.findall(r"^  (-.*)\n(?=(.*))", run.out, re.MULTILINE)
        assert flags
        for flag, next_line in flags:
            assert re.search(r"\S  +\S", flag) or next_line.startswith(" " * 10), flag


@pytest.mark.slow
async def test_the_help_of_a_service_explains_its_flags_and_variables() -> None:
    run = await specdec("draft", "--help", COLUMNS="80")
    assert (run.status, run.err) == (0, "")
    assert run.out.startswith("usage: specdec draft ")
    flags = set(re.findall(r"^  --([a-z-]+)", run.out, re.MULTILINE))
    assert {"port", "model", "device", "keep-layers"} <= flags
    text = " ".join(run.out.split())
    for flag in flags:
        variable = f"SPECDEC_DRAFT_{flag.replace('-', '_').upper()}"
        assert re.search(rf"--{flag} [^-]*[a-z].* \[env: {variable}\]", text), flag


# --- Health -------------------------------------------------------------------------------------


def where(gateway: str, draft: str, verifier: str) -> tuple[str, ...]:
    return ("--gateway", gateway, "--draft", draft, "--verifier", verifier)


async def test_health_tells_of_each_service_and_by_its_status(target_folder: Path) -> None:
    nobody = f"127.0.0.1:{free_port()}"
    async with (
        verifier(target_folder) as (verifier_address, _),
        draft(target_folder) as (draft_address, _),
        gateway(verifier_address, draft_address) as front,
    ):
        all_three = where(front.address, draft_address, verifier_address)
        good = await specdec("health", *all_three)
        assert (good.status, good.err) == (0, "")
        for service, line in zip(services.ALL, good.out.splitlines(), strict=True):
            assert re.fullmatch(rf"{service.name} +127\.0\.0\.1:\d+ +ready", line)

        without_draft = where(front.address, nobody, verifier_address)
        bad = await specdec("health", *without_draft)
        assert bad.status == 1
        assert [line.endswith(" ready") for line in bad.out.splitlines()] == [True, False, True]
        assert "nothing answers" in bad.out

        chosen = await specdec("health", "gateway", "verifier", *without_draft)
        assert chosen.status == 0
        assert "draft" not in chosen.out

        swapped = await specdec("health", *where(front.address, verifier_address, draft_address))
        assert swapped.status == 1
        assert "what listens there is not the draft" in swapped.out
        assert "what listens there is not the verifier" in swapped.out

        unknown = await specdec("health", "drafts")
        assert unknown.status == 2
        assert "gateway, draft, verifier" in unknown.err


async def test_health_can_wait(target_folder: Path) -> None:
    port = free_port()
    command = ("health", "verifier", "--verifier", f"127.0.0.1:{port}", "--wait")
    begun = time.monotonic()
    assert (await specdec(*command, "1")).status == 1
    assert time.monotonic() - begun >= 1
    async with started(*command, "60") as process:
        await asyncio.sleep(1.5)
        assert process.returncode is None
        async with verifier(target_folder, port=port):
            out, _ = await asyncio.wait_for(process.communicate(), 30)
    assert process.returncode == 0
    assert out.decode().endswith(" ready\n")
