"""Runs the command line for tests: as a process, on a pipe and on a terminal."""

from __future__ import annotations

import asyncio
import fcntl
import os
import pty
import re
import struct
import sys
import termios
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from specdec.v1 import gateway_pb2, gateway_pb2_grpc

SPECDEC = Path(sys.executable).with_name("specdec")
PROMPT = "The quick brown fox"
ACCEPTED = gateway_pb2.TOKEN_ORIGIN_ACCEPTED
CORRECTION = gateway_pb2.TOKEN_ORIGIN_CORRECTION
BONUS = gateway_pb2.TOKEN_ORIGIN_BONUS
PLAIN = gateway_pb2.TOKEN_ORIGIN_PLAIN


@dataclass
class Run:
    """How a command went."""

    status: int | None
    out: str
    err: str

    @property
    def error(self) -> str:
        """What it said was wrong, which must be one line and all that it said."""
        assert self.status == 1, self
        assert self.out == "", self
        assert re.fullmatch(r"error: [^\n]+\n", self.err), self
        return self.err.removeprefix("error: ")


def environment(**changes: str) -> dict[str, str]:
    """Of a user who has set nothing."""
    return {
        "PATH": os.environ["PATH"],
        "HOME": os.environ.get("HOME", "/"),
        "LANG": "C.UTF-8",
        "TERM": "xterm-256color",
        "OMP_NUM_THREADS": "1",
        **changes,
    }


@asynccontextmanager
async def started(
    *arguments: str | Path, env: dict[str, str] | None = None, **streams: Any
) -> AsyncIterator[asyncio.subprocess.Process]:
    """A running command, ended with all that it has started when the block ends."""
    streams = {
        "stdin": asyncio.subprocess.PIPE,
        "stdout": asyncio.subprocess.PIPE,
        "stderr": asyncio.subprocess.PIPE,
        **streams,
    }
    process = await asyncio.create_subprocess_exec(
        SPECDEC, *arguments, env=env or environment(), **streams
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.terminate()
            try:
                await asyncio.wait_for(process.wait(), 30)
            except TimeoutError:
                process.kill()
        await process.wait()


async def specdec(*arguments: str | Path, stdin: str | bytes = "", **env: str) -> Run:
    """Runs a command on pipes."""
    given = stdin.encode() if isinstance(stdin, str) else stdin
    async with started(*arguments, env=environment(**env)) as process:
        out, err = await asyncio.wait_for(process.communicate(given), 60)
        return Run(process.returncode, out.decode(), err.decode())


async def on_a_terminal(*arguments: str | Path, columns: int = 80, **env: str) -> str:
    """Runs a command that succeeds on a pseudo-terminal. Gives all that it sent there."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))

    def read_all() -> bytes:
        read = b""
        try:
            while data := os.read(master, 1 << 16):
                read += data
        except OSError:
            pass  # how the end of a terminal looks
        return read

    try:
        async with started(
            *arguments, env=environment(**env), stdin=slave, stdout=slave, stderr=slave
        ) as process:
            os.close(slave)
            sent = await asyncio.wait_for(asyncio.to_thread(read_all), 60)
            assert await process.wait() == 0, sent
    finally:
        os.close(master)
    return sent.decode().replace("\r\n", "\n")


class Scripted(gateway_pb2_grpc.GenerationServiceServicer):
    """A gateway that says what it was told to say."""

    def __init__(self, tokens: tuple[tuple[str, int], ...], then: str) -> None:
        self._tokens, self._then = tokens, then
        self.requests: list[gateway_pb2.GenerateRequest] = []
        self.asked = asyncio.Event()
        self.left = asyncio.Event()
        self.address = ""

    async def Generate(self, request: gateway_pb2.GenerateRequest, context: Any) -> Any:
        self.requests.append(request)
        self.asked.set()
        try:
            for index, (text, origin) in enumerate(self._tokens):
                chunk = gateway_pb2.Chunk(
                    text=text, token_texts=[text], token_ids=[index], origins=[origin]
                )
                yield gateway_pb2.GenerateResponse(chunk=chunk)
            if self._then == "hang":
                await asyncio.Event().wait()
            elif self._then == "fail":
                await context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")
            completion = gateway_pb2.Completion(
                finish_reason=gateway_pb2.FINISH_REASON_STOP, matched_token_id=0
            )
            yield gateway_pb2.GenerateResponse(completion=completion)
        finally:
            self.left.set()


@asynccontextmanager
async def listening(add: Callable[[grpc.aio.Server], None]) -> AsyncIterator[str]:
    """A server of what `add` adds to it, while the block runs. Yields its address."""
    server = grpc.aio.server()
    add(server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


@asynccontextmanager
async def scripted(*tokens: tuple[str, int], then: str = "complete") -> AsyncIterator[Scripted]:
    servicer = Scripted(tokens, then)
    add = gateway_pb2_grpc.add_GenerationServiceServicer_to_server
    async with listening(lambda server: add(servicer, server)) as servicer.address:
        yield servicer
