"""How much memory the KV cache gets."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch

from specdec.lm.architecture import ModelLoadError
from specdec.lm.loading import LoadedModel
from specdec.lm.pages import pages_for

_GPU_SHARE = 0.8
_CPU_SHARE = 0.25
_CGROUP = Path("/sys/fs/cgroup")
_CPU_MOST = 2 * 1024**3


def pages_within(budget: int | Literal["auto"], loaded: LoadedModel) -> int:
    """How many KV pages fit into so many bytes, or into a part of the free memory.

    With "auto" there are no more than 64 sessions of full length could use.

    Raises:
        ModelLoadError: there is no room for a single page.
    """
    per_page = loaded.model.bytes_per_page
    most = 64 * pages_for(loaded.max_context_length)
    if budget == "auto":
        count = min(_free_bytes(loaded.model.device) // per_page, most)
    else:
        count = budget // per_page
    if count < 1:
        raise ModelLoadError(
            f"the KV cache has no room for one page of {per_page} bytes: give more --kv-memory"
        )
    return count


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free * _GPU_SHARE)
    available = _available_memory()
    return min(int(available * _CPU_SHARE), _CPU_MOST)


def _available_memory() -> int:
    """What the kernel says can be had without swapping, within the limit of the container."""
    free = [int(_CPU_MOST / _CPU_SHARE)]
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        found = dict(line.split(":", 1) for line in lines)
        free.append(int(found["MemAvailable"].split()[0]) * 1024)
    except (OSError, KeyError):
        # Not Linux.
        pass
    try:
        limit, used = ((_CGROUP / name).read_text() for name in ("memory.max", "memory.current"))
        free.append(max(0, int(limit) - int(used)))
    except (OSError, ValueError):
        # No container, or one without a limit: "max".
        pass
    return min(free)
