"""Runs a command's work until it ends or a signal asks for the end."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Stopped(Exception):
    """A signal asked for the end, and the work has ended."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(number.name)
        self.exit_code = 128 + number
        """What a shell makes of a process that dies of this signal."""


def run(work: Coroutine[Any, Any, T], on_stop: Callable[[], None]) -> T:
    """Runs a coroutine. SIGINT, SIGTERM and SIGHUP cancel it, and cancel it again while it ends.

    Args:
        work: what to run.
        on_stop: called at the first signal.

    Raises:
        Stopped: there was a signal, and the work has ended.
    """
    return asyncio.run(_until_signal(work, on_stop))


async def _until_signal(work: Coroutine[Any, Any, T], on_stop: Callable[[], None]) -> T:
    task = asyncio.ensure_future(work)
    received: list[signal.Signals] = []

    def stop(number: signal.Signals) -> None:
        received.append(number)
        task.cancel()
        if len(received) == 1:
            on_stop()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # nohup has SIGHUP ignored, and that is to stay.
        if number is not signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
            asyncio.get_running_loop().add_signal_handler(number, stop, number)
    try:
        return await task
    except asyncio.CancelledError:
        if not received:
            raise
        raise Stopped(received[0]) from None
