"""The model thread: the one thread that touches the device, so that the event loop never waits."""

from __future__ import annotations

import asyncio
import math
import queue
import threading
import time
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, ParamSpec, TypeVar

import structlog
import torch

from specdec.lm.quarantine import DeviceLost
from specdec.lm.residents import IDLE_SECONDS
from specdec.lm.scheduler import Scheduler
from specdec.lm.work import Work
from specdec.v1 import common_pb2

P = ParamSpec("P")
T = TypeVar("T")
_log = structlog.get_logger()
_LOOK_SECONDS = 1.0
"""How soon it is noticed that the thread is stuck."""


class ModelThreadError(Exception):
    """The model thread has died, or is stuck. The message says which."""


class Timed(NamedTuple, Generic[T]):
    """A result and where its time went."""

    value: T
    timings: common_pb2.Timings


class _Call(NamedTuple):
    """Something to run between two passes, and who waits for it, if anybody does."""

    function: Callable[[], Any]
    reply: _Reply | None


class _Reply:
    """A future of the event loop that is resolved from the model thread."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.future: asyncio.Future[Any] = self._loop.create_future()
        self.asked = time.monotonic()

    def send(self, result: Any, error: BaseException | None) -> None:
        try:
            self._loop.call_soon_threadsafe(self._set, result, error)
        except RuntimeError:
            # The loop is closed: the process ends, and nobody waits any more.
            return

    def _set(self, result: Any, error: BaseException | None) -> None:
        if self.future.done():
            return
        if error is None:
            self.future.set_result(result)
        else:
            self.future.set_exception(error)


class ModelThread:
    """Runs functions in the order of their arrival, and the scheduler's passes between them."""

    def __init__(self, num_threads: int | None = None) -> None:
        """`num_threads`: how many cores one operation may use; None leaves it to torch."""
        self._num_threads = num_threads
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._scheduler: Scheduler | None = None
        self._closed = False
        self._waiting: set[_Reply] = set()
        """Those that somebody waits for."""
        self._died: str | None = None
        self._busy_since: float | None = None
        """When it began with what it is at, by time.monotonic(). None while it has nothing to do.

        This is the heartbeat: a thread that waits is well, however long it has been waiting."""
        self._stall_seconds = math.inf
        threading.Thread(target=self._main, name="model", daemon=True).start()

    @property
    def fault(self) -> str | None:
        """Why nothing can be run, or None if it can. One that is stuck may come to again."""
        if self._died is not None:
            return self._died
        busy_since = self._busy_since
        if busy_since is not None and time.monotonic() - busy_since > self._stall_seconds:
            return f"the model thread has been stuck for more than {self._stall_seconds:g} s"
        return None

    def watch(self, stall_seconds: float) -> None:
        """Has those who wait fail once the thread is at one pass or call for so many seconds.

        To be called when loading is done, which takes what it takes.
        """
        self._stall_seconds = stall_seconds
        self._look(min(stall_seconds / 4, _LOOK_SECONDS), asyncio.get_running_loop())

    def _look(self, seconds: float, loop: asyncio.AbstractEventLoop) -> None:
        if self._closed:
            return
        fault = self.fault
        if fault is not None:
            self._fail_waiting(fault)
        loop.call_later(seconds, self._look, seconds, loop)

    def _fail_waiting(self, fault: str) -> None:
        waiting = list(self._waiting)
        if waiting:
            _log.error("model thread", fault=fault, sessions=len(waiting))
        for reply in waiting:
            reply.send(None, ModelThreadError(fault))

    def attach(self, scheduler: Scheduler) -> None:
        """Runs this scheduler's passes from here on."""
        self._scheduler = scheduler

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Timed[T]:
        """Runs a function on the model thread.

        If the caller is cancelled, the function runs all the same.

        Raises:
            ModelThreadError: the thread has died or is stuck.
        """
        reply = _Reply()

        def timed() -> Timed[T]:
            begun = time.monotonic()
            value = function(*args, **kwargs)
            return Timed(value, _timings(begun - reply.asked, time.monotonic() - begun))

        result: Timed[T] = await self._ask(_Call(timed, reply), reply)
        return result

    async def work(self, work: Work) -> Timed[Any]:
        """Has the scheduler do a work, and returns its result.

        Raises:
            ModelThreadError: the thread has died or is stuck.
        """
        reply = _Reply()

        def ended() -> None:
            begun = reply.asked if work.begun is None else work.begun
            timings = _timings(begun - reply.asked, work.compute_seconds)
            reply.send(Timed(work.result, timings), work.error)

        def add() -> None:
            assert self._scheduler is not None
            self._scheduler.add(work, ended)

        result: Timed[Any] = await self._ask(_Call(add, None), reply)
        return result

    async def _ask(self, call: _Call, reply: _Reply) -> Any:
        """Waits for the reply that a call leads to."""
        self._waiting.add(reply)
        try:
            fault = self.fault
            if fault is not None:
                raise ModelThreadError(fault)
            self._calls.put(call)
            return await reply.future
        finally:
            self._waiting.discard(reply)

    def post(self, function: Callable[[], None]) -> None:
        """Runs a function on the model thread, if that lives; nobody waits for it."""
        if self._died is None:
            self._calls.put(_Call(function, None))

    def close(self) -> None:
        """Ends the thread after what it is at. Nobody waits for it."""
        self._closed = True
        self._calls.put(None)

    def _main(self) -> None:
        try:
            self._serve()
        except BaseException as error:
            _log.exception("model thread died")
            self._died = f"the model thread has died of {type(error).__name__}"
            self._fail_waiting(self._died)

    def _serve(self) -> None:
        if self._num_threads is not None:
            torch.set_num_threads(self._num_threads)
        wait: float | None = None
        while not self._closed:
            self._run_calls(wait)
            wait = None
            if self._scheduler is not None and not self._closed:
                wait = self._scheduler.wait_seconds()
                if wait == 0.0:
                    self._busy_since = time.monotonic()
                    wait = self._step(self._scheduler)
                    self._busy_since = None

    def _run_calls(self, wait: float | None) -> None:
        """Runs what has arrived. Waits so many seconds for the first call; None is for ever."""
        while not self._closed:
            try:
                call = self._calls.get(wait != 0.0, wait)
            except queue.Empty:
                return
            if call is not None:
                self._busy_since = time.monotonic()
                self._run(call)
                self._busy_since = None
            wait = 0.0

    def _run(self, call: _Call) -> None:
        try:
            result, error = call.function(), None
        except BaseException as caught:
            result, error = None, caught
        if call.reply is not None:
            call.reply.send(result, error)
        elif error is not None:
            _log.error("model thread", exc_info=error)

    def _step(self, scheduler: Scheduler) -> float | None:
        """Runs a pass. Returns how long to wait for a call before the next; None is for ever."""
        try:
            if scheduler.step():
                return 0.0
        except DeviceLost as error:
            scheduler.fail_all(error)
            raise
        except Exception as error:
            _log.exception("pass failed")
            scheduler.fail_all(error)
        # Works that wait for pages are looked at again without a call, too.
        return IDLE_SECONDS if scheduler.has_work else None


def _timings(queue_seconds: float, compute_seconds: float) -> common_pb2.Timings:
    return common_pb2.Timings(
        queue_us=int(queue_seconds * 1e6), compute_us=int(compute_seconds * 1e6)
    )
