"""The model thread: the one thread that touches the device, so that the event loop never waits."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, NamedTuple, ParamSpec, TypeVar

import torch

from specdec.v1 import common_pb2

P = ParamSpec("P")
T = TypeVar("T")


class Timed(NamedTuple, Generic[T]):
    """A result and where its time went."""

    value: T
    timings: common_pb2.Timings


class ModelThread:
    """Runs functions one at a time, in the order of their arrival."""

    def __init__(self, num_threads: int | None = None) -> None:
        """`num_threads`: how many cores one operation may use; None leaves it to torch."""

        def initialize() -> None:
            if num_threads is not None:
                torch.set_num_threads(num_threads)

        self._executor = ThreadPoolExecutor(1, "model", initialize)

    async def run(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Timed[T]:
        """Runs `work` on the model thread.

        If the caller is cancelled, work that has not begun never runs; work that has begun ends.
        """
        asked = time.monotonic_ns()

        def timed() -> Timed[T]:
            begun = time.monotonic_ns()
            value = work(*args, **kwargs)
            ended = time.monotonic_ns()
            timings = common_pb2.Timings(
                queue_us=(begun - asked) // 1000, compute_us=(ended - begun) // 1000
            )
            return Timed(value, timings)

        return await asyncio.get_running_loop().run_in_executor(self._executor, timed)

    def close(self) -> None:
        """Drops what has not begun. What has begun ends by itself; nobody waits for it."""
        self._executor.shutdown(wait=False, cancel_futures=True)
