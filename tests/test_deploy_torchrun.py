"""What the pods of a LeaderWorkerSet run makes one verifier of several hosts."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from specdec import services
from specdec.cli.health import wait_until_ready
from tests import stack
from tests.manifests import environment, kustomize, named
from tests.test_serving import environment as surroundings
from tests.test_tensor_parallel import model_folder  # noqa: F401


def pods() -> list[tuple[list[str], dict[str, str]]]:
    """The command and the variables of the leader and of a worker."""
    documents = kustomize("tensor-parallel")
    group = named(documents, "LeaderWorkerSet", "specdec-verifier")["spec"]["leaderWorkerTemplate"]
    assert group["size"] == 2
    containers: list[dict[str, Any]] = [
        group[f"{role}Template"]["spec"]["containers"][0] for role in ("leader", "worker")
    ]
    return [(c["command"], environment(c, documents)) for c in containers]


@contextmanager
def hosts(model: Path, folder: Path) -> Iterator[tuple[str, list[Path]]]:
    """Two hosts of one process each, on loopback and CPUs; all else is as in the manifest.

    Yields the leader's address, and the logs of both.
    """
    meeting, port = stack.free_port(), stack.free_port()
    logs = [folder / f"{index}.log" for index in range(2)]
    processes = []
    try:
        for (command, variables), (index, log) in zip(pods(), enumerate(logs), strict=True):
            changes = {
                "$(LWS_GROUP_SIZE)": "2",
                "$(LWS_WORKER_INDEX)": str(index),
                "$(LWS_LEADER_ADDRESS)": "127.0.0.1",
                "=29500": f"={meeting}",
                "=gpu": "=1",
            }
            words = command
            for old, new in changes.items():
                words = [word.replace(old, new) for word in words]
            assert words != command
            here = {
                **variables,
                "SPECDEC_VERIFIER_MODEL": str(model),
                "SPECDEC_VERIFIER_PORT": str(port),
                "SPECDEC_VERIFIER_DTYPE": "float32",
                "SPECDEC_VERIFIER_KV_MEMORY": "1MiB",
            }
            program = Path(sys.executable).with_name(words[0])
            with log.open("w") as stderr:
                processes.append(
                    subprocess.Popen([program, *words[1:]], env=surroundings(**here), stderr=stderr)
                )
        yield f"127.0.0.1:{port}", logs
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait(30)
    finally:
        for process in processes:
            process.kill()
            process.wait()


@pytest.mark.slow
async def test_leader_serves_worker_follows_and_both_end(
    model_folder: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    with hosts(model_folder, tmp_path) as (address, logs):
        fault = await wait_until_ready(services.VERIFIER, address, 120)
        leader, worker = (log.read_text() for log in logs)
        assert fault is None, (leader, worker)
        assert '"event": "ready"' in leader
        assert '"event": "following"' in worker
    assert '"event": "stopped"' in logs[0].read_text()
