"""A target too large for one device: transformers' tensor parallelism over processes of torchrun.

Each process holds a shard of every layer, and all run the same passes in step. The one of rank 0
serves, and tells the others what to run; these follow it, and have no port.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import structlog
import torch
import torch.distributed as dist
from transformers import PreTrainedConfig

from specdec.lm.architecture import ModelLoadError
from specdec.lm.batch import Segment
from specdec.lm.model import CausalLM

_log = structlog.get_logger()

_IDLE = timedelta(days=3650)
"""How long a process waits for the next command: an idle service must not time out."""
_LOADING = timedelta(hours=2)
"""How long the processes wait for each other: they do not read their weights at one pace."""
_END_SECONDS = 10.0
"""How long after an error it may take until the end of another process is noticed."""


def world_size() -> int:
    """How many processes torchrun started; 1 without torchrun."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def rank() -> int:
    """This process's number among them, from 0."""
    return int(os.environ["RANK"]) if world_size() > 1 else 0


class Team:
    """The processes that torchrun started together, as one of them sees them."""

    def __init__(self, device: torch.device) -> None:
        """Waits until all are there. To be called in the thread that runs the model."""
        self.device = device
        self.size = world_size()
        if device.type == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            timeout=_LOADING,
            device_id=device if device.type == "cuda" else None,
        )
        # Commands go by the CPU: whoever waits for one leaves the GPU alone.
        self._commands = dist.new_group(backend="gloo", timeout=_IDLE)
        self._watch = dist.new_group(backend="gloo", timeout=_IDLE)
        self._ended: Future[None] = Future()
        threading.Thread(target=self._watch_neighbour, name="watch", daemon=True).start()

    def _watch_neighbour(self) -> None:
        """Waits for a message that is never sent: what comes is the end of its sender.

        Each process watches the next one, so that the end of one goes around.
        """
        try:
            neighbour = (rank() + 1) % self.size
            dist.recv(torch.empty(1), src=neighbour, group=self._watch)
        except Exception:
            self._ended.set_result(None)

    async def end(self) -> None:
        """Waits until another process has ended: no pass can be run from then on."""
        # Shielded: a waiter that is cancelled must not cancel what others wait for.
        await asyncio.shield(asyncio.wrap_future(self._ended))

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """Ends this process, and thereby all, if what it does fails.

        After an error nobody knows which of the passes the others have run.
        """
        try:
            yield
        except Exception:
            # It may be what the end of another process looks like from here.
            if not wait([self._ended], _END_SECONDS).done:
                _log.exception("the processes are out of step")
                os._exit(1)
            raise

    def tell(self, name: str, *arguments: Any) -> None:
        """Has the others call this method of their models."""
        dist.broadcast_object_list([(name, arguments)], src=0, group=self._commands)

    def follow(self, model: CausalLM) -> None:
        """Runs what rank 0 runs, until it ends."""
        methods: dict[str, Callable[..., object]] = {
            "allocate": model.allocate,
            "clear": model.clear,
            "forward": model.forward,
            "move": model.move,
        }
        while True:
            command: list[Any] = [None]
            try:
                with self.in_step():
                    dist.broadcast_object_list(command, src=0, group=self._commands)
                    name, arguments = command[0]
                    methods[name](*arguments)
            except Exception:
                return


class LeadingLM(CausalLM):
    """The model of rank 0: the other processes of its team run what it runs."""

    def __init__(self, model: CausalLM, team: Team) -> None:
        """Takes over `model`, which is not used otherwise from here on."""
        vars(self).update(vars(model))
        self._team = team

    def allocate(self, num_pages: int) -> None:
        with self._team.in_step():
            self._team.tell("allocate", num_pages)
            super().allocate(num_pages)

    def clear(self, pages: list[int]) -> None:
        if pages:
            with self._team.in_step():
                self._team.tell("clear", pages)
                super().clear(pages)

    def move(self, moves: Sequence[tuple[int, int]]) -> None:
        with self._team.in_step():
            self._team.tell("move", moves)
            super().move(moves)

    def forward(self, segments: Sequence[Segment]) -> torch.Tensor:
        with self._team.in_step():
            self._team.tell("forward", segments)
            return super().forward(segments)


def join(device: str) -> Team | None:
    """Meets the other processes of torchrun, if there are any.

    Args:
        device: as in the settings.

    Raises:
        ModelLoadError: it is not the kind of device that the processes can share a model on.
    """
    size = world_size()
    if size == 1:
        return None
    accelerator = torch.accelerator.current_accelerator()
    kind = "cpu" if accelerator is None else accelerator.type
    if kind not in {"cpu", "cuda"} or device not in {"auto", kind}:
        raise ModelLoadError(
            f"device {device!r} cannot be used by {size} processes of torchrun: leave out --device "
            "(each takes the GPU of its local rank, or the CPU where no GPU is visible)"
        )
    return Team(torch.device(kind, 0 if kind == "cpu" else int(os.environ["LOCAL_RANK"])))


def check_plan(config: PreTrainedConfig, size: int) -> None:
    """Refuses what transformers cannot divide among so many processes.

    Raises:
        ModelLoadError: says what to do.
    """
    text = config.get_text_config()
    plan: dict[str, str] = getattr(text, "base_model_tp_plan", None) or {}
    if not plan:
        raise ModelLoadError(
            f"architecture {config.model_type!r} has no tensor-parallel plan in transformers: "
            "start the service without torchrun"
        )
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    if plan.get("layers.*.self_attn.k_proj") == "colwise" and heads % size:
        raise ModelLoadError(
            f"{heads} key heads cannot be divided among {size} processes: choose an "
            f"--nproc-per-node that divides {heads}"
        )
