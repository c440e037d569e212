"""Starts a model, and runs a service that is nothing but a model: listen, load, warm up, serve."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import grpc
import structlog

from specdec.lm.architecture import ModelLoadError
from specdec.lm.loading import LoadedModel, load
from specdec.lm.memory import pages_within
from specdec.lm.pages import PAGE_SIZE
from specdec.lm.runtime import ModelRuntime
from specdec.lm.settings import ModelServiceSettings
from specdec.lm.tensor_parallel import Team, join, rank
from specdec.lm.thread import ModelThread, Timed
from specdec.models.cache import default_target_path, is_pulled
from specdec.open_sessions import OpenSessions
from specdec.services import Service
from specdec.serving import StartError, listening

_log = structlog.get_logger()


class NeedsRuntime(Protocol):
    """A servicer that serves once it has a runtime."""

    runtime: ModelRuntime | None
    sessions: OpenSessions


class Start:
    """The start of a model on a thread of its own."""

    def __init__(
        self,
        settings: ModelServiceSettings,
        model_id: str,
        *,
        keep_layers: Sequence[int] | None = None,
        base: str | None = None,
    ) -> None:
        """
        Args:
            settings: how it is run.
            model_id: which model.
            keep_layers: indices of the decoder layers to keep; None keeps all.
            base: where a distilled draft finds its base, if that is not where it was.
        """
        self.model_id = model_id
        self.thread = ModelThread(settings.num_threads)
        """To be closed by whoever started it."""
        self.facts: dict[str, Any] = {}
        """What the log says of the model once it is ready."""
        self._settings = settings
        self._keep_layers, self._base = keep_layers, base

    async def load(self, team: Team | None = None) -> Timed[LoadedModel]:
        """Loads the weights.

        Args:
            team: that holds a shard each, if there are several.

        Raises:
            ModelLoadError: they cannot be had, or the architecture is not supported.
        """
        settings = self._settings
        return await self.thread.run(
            load,
            self.model_id,
            device=settings.device,
            dtype=settings.dtype,
            keep_layers=self._keep_layers,
            max_context_length=settings.max_context_length,
            deterministic=settings.deterministic,
            base=self._base,
            team=team,
        )

    async def runtime(self, loaded: Timed[LoadedModel]) -> ModelRuntime:
        """Makes the runtime and warms it up.

        Raises:
            ModelLoadError: there is no memory for the KV cache.
        """
        settings, (value, timings) = self._settings, loaded
        num_pages = pages_within(settings.kv_memory, value)
        runtime, _ = await self.thread.run(
            ModelRuntime,
            value,
            self.thread,
            model_id=self.model_id,
            num_pages=num_pages,
            max_num_draft_tokens=settings.max_num_draft_tokens,
            max_rows=settings.max_rows,
        )
        if value.model.device.type == "cuda":
            await self.thread.run(
                value.model.record_graphs,
                num_pages,
                progress=lambda done, total: _log.info("recording", done=done, total=total),
            )
        _log.info(
            "KV cache",
            pages=num_pages,
            tokens=num_pages * PAGE_SIZE,
            bytes=num_pages * value.model.bytes_per_page,
            max_context_length=runtime.info.max_context_length,
        )
        self.facts = {
            "model": self.model_id,
            "device": str(value.model.device),
            "dtype": str(value.model.dtype).removeprefix("torch."),
            "seconds": round(timings.compute_us / 1e6, 1),
            "tokenizer_sha256": value.tokenizer.table_sha256,
        }
        return runtime


async def serve(
    settings: ModelServiceSettings,
    *,
    service: Service,
    servicer: NeedsRuntime,
    register: Callable[[grpc.aio.Server], None],
) -> None:
    """Serves until cancelled. Health answers while the model loads, NOT_SERVING until it is warm.

    Raises:
        StartError: the port or the model cannot be had.
    """
    start = Start(settings, settings.model or embedded_default())
    try:
        if rank() > 0:
            team = (await start.thread.run(join, settings.device)).value
            await _follow(start.thread, await start.load(team), team)
            return
        async with listening(
            settings,
            service,
            register,
            drain=servicer.sessions.drain,
            alive=lambda: start.thread.fault is None,
        ) as (port, health):
            _log.info("loading", model=start.model_id, address=f"{settings.host}:{port}")
            team = (await start.thread.run(join, settings.device)).value
            servicer.runtime = await start.runtime(await start.load(team))
            start.thread.watch(settings.stall_seconds)
            health.set(True)
            _log.info("ready", **start.facts)
            await (asyncio.Event().wait() if team is None else team.end())
    except ModelLoadError as error:
        raise StartError(str(error)) from error
    finally:
        start.thread.close()


async def _follow(thread: ModelThread, loaded: Timed[LoadedModel], team: Team | None) -> None:
    """Runs a shard for the process that serves, until that one ends."""
    assert team is not None
    _log.info("following", rank=rank(), device=str(loaded.value.model.device))
    thread.post(partial(team.follow, loaded.value.model))
    try:
        await team.end()
    except asyncio.CancelledError:
        # The signal goes to all processes, and the sessions that are ending need this one.
        await team.end()


def embedded_default() -> str:
    """The folder of the embedded default target.

    Raises:
        StartError: it has not been pulled.
    """
    folder = default_target_path()
    if not is_pulled(folder):
        raise StartError(
            "the default model is not there: run `specdec models pull`, or name one with --model"
        )
    return str(folder)
