"""Runs a model service: listen, load, warm up, serve."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

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
from specdec.services import Service
from specdec.serving import StartError, listening

_log = structlog.get_logger()


class NeedsRuntime(Protocol):
    """A servicer that serves once it has a runtime."""

    runtime: ModelRuntime | None


async def serve(
    settings: ModelServiceSettings,
    *,
    service: Service,
    servicer: NeedsRuntime,
    register: Callable[[grpc.aio.Server], None],
    keep_layers: Sequence[int] | None = None,
) -> None:
    """Serves until cancelled. Health answers while the model loads, NOT_SERVING until it is warm.

    Raises:
        StartError: the port or the model cannot be had.
    """
    model_id = settings.model or embedded_default()
    thread = ModelThread(settings.num_threads)

    async def load_model() -> tuple[Timed[LoadedModel], Team | None]:
        team = (await thread.run(join, settings.device)).value
        loaded = await thread.run(
            load,
            model_id,
            device=settings.device,
            dtype=settings.dtype,
            keep_layers=keep_layers,
            max_context_length=settings.max_context_length,
            deterministic=settings.deterministic,
            team=team,
        )
        return loaded, team

    try:
        if rank() > 0:
            await _follow(thread, *(await load_model()))
            return
        async with listening(settings, service, register) as (port, health):
            _log.info("loading", model=model_id, address=f"{settings.host}:{port}")
            (loaded, timings), team = await load_model()
            num_pages = pages_within(settings.kv_memory, loaded)
            runtime, _ = await thread.run(
                ModelRuntime,
                loaded,
                thread,
                model_id=model_id,
                num_pages=num_pages,
                max_num_draft_tokens=settings.max_num_draft_tokens,
                max_rows=settings.max_rows,
            )
            if loaded.model.device.type == "cuda":
                await thread.run(
                    loaded.model.record_graphs,
                    num_pages,
                    progress=lambda done, total: _log.info("recording", done=done, total=total),
                )
            servicer.runtime = runtime
            await health.set(True)
            _log.info(
                "KV cache",
                pages=num_pages,
                tokens=num_pages * PAGE_SIZE,
                bytes=num_pages * loaded.model.bytes_per_page,
                max_context_length=runtime.info.max_context_length,
            )
            _log.info(
                "ready",
                model=model_id,
                device=str(loaded.model.device),
                dtype=str(loaded.model.dtype).removeprefix("torch."),
                seconds=round(timings.compute_us / 1e6, 1),
                tokenizer_sha256=loaded.tokenizer.table_sha256,
            )
            await (asyncio.Event().wait() if team is None else team.end())
    except ModelLoadError as error:
        raise StartError(str(error)) from error
    finally:
        thread.close()


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
