"""The images: what the linter says of the Dockerfile, what is in them, and what they run."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from specdec import services
from specdec.cli.main import app
from tests.manifest_checks import VERSION
from tests.manifests import COMBINATIONS, kustomize, workloads

ROOT = Path(__file__).parents[1]
DOCKERFILE = ROOT / "Dockerfile"
BIN = Path(sys.executable).parent
MODEL_PACKAGES = {"torch", "transformers", "numpy", "safetensors", "accelerate", "gguf"}
GUIDE = ROOT / "docs" / "deployment.md"


def hadolint(text: str) -> list[str]:
    """The rules that a Dockerfile breaks."""
    result = subprocess.run(
        [BIN / "hadolint", "--format", "json", "-"],
        input=text,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return [finding["code"] for finding in json.loads(result.stdout)]


def stages() -> dict[str, list[str]]:
    """The instructions of each stage, with those of the stages that it is made from before them."""
    found: dict[str, list[str]] = {}
    lines = re.sub(r"\\\n", " ", DOCKERFILE.read_text(encoding="utf-8")).splitlines()
    name = ""
    for line in (line for line in lines if line and not line.startswith("#")):
        if start := re.fullmatch(r"FROM (\S+) AS (\S+)", line):
            name = start[2]
            found[name] = list(found.get(start[1], [f"FROM {start[1]}"]))
        else:
            found[name].append(line)
    return found


def last(instruction: str, stage: str) -> str:
    """The argument of the last such instruction of a stage, which is the one that counts."""
    lines = [line for line in stages()[stage] if line.startswith(f"{instruction} ")]
    return lines[-1].removeprefix(f"{instruction} ")


def test_the_linter_finds_nothing() -> None:
    assert hadolint(DOCKERFILE.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("old", "new", "rule"),
    [
        (r"python:3.11-slim-bookworm@\S+", "python:latest", "DL3007"),
        (r"python:3.11-slim-bookworm@\S+", "python", "DL3006"),
        (r'ENTRYPOINT \["specdec", "draft"\]', "ENTRYPOINT specdec draft", "DL3025"),
        ("WORKDIR /src", "WORKDIR src", "DL3000"),
        ("EXPOSE 50051", "EXPOSE 500510", "DL3011"),
    ],
)
def test_the_linter_finds_a_planted_fault(old: str, new: str, rule: str) -> None:
    text, count = re.subn(old, new, DOCKERFILE.read_text(encoding="utf-8"))
    assert count == 1
    assert rule in hadolint(text)


@pytest.mark.parametrize("service", services.ALL, ids=lambda service: service.name)
def test_image_runs_its_service_without_root_or_shell(service: services.Service) -> None:
    (base,) = [line for line in stages()[service.name] if line.startswith("FROM")]
    assert re.fullmatch(r"FROM python:3\.11-slim-\w+@sha256:[0-9a-f]{64}", base)
    assert last("USER", service.name) == "10001:10001"
    assert json.loads(last("ENTRYPOINT", service.name)) == ["specdec", service.name]
    assert last("EXPOSE", service.name) == str(service.port)
    venv = {"gateway": "gateway-venv"}.get(service.name, "model-venv")
    assert last("COPY", service.name) == f"--from={venv} /opt/venv /opt/venv"


def test_gateway_image_is_installed_without_the_model_runtime() -> None:
    installs = [line for line in stages()["gateway-venv"] if "pip install" in line]
    assert [line.split()[-1] for line in installs] == ['".[gateway]"', "."]
    assert "TORCH_INDEX_URL" not in " ".join(stages()["gateway-venv"])
    assert any('--index-url "$TORCH_INDEX_URL" torch' in s for s in stages()["model-venv"])


def test_what_containers_run_is_a_command_of_the_venv() -> None:
    """The entry points, and the commands that manifests put in their place."""
    commands = {tuple(json.loads(last("ENTRYPOINT", s.name))) for s in services.ALL}
    for overlay, components in COMBINATIONS:
        for workload in workloads(kustomize(overlay, components)):
            commands |= {tuple(c["command"]) for c in workload.containers if "command" in c}
    scripts = {script.name for script in metadata.entry_points(group="console_scripts")}
    ours = {command.name for command in app.registered_commands}
    ours |= {group.name for group in app.registered_groups}
    for command in commands:
        assert command[0] in scripts
        if command[0] == "specdec":
            assert command[1] in ours
    assert {command[0] for command in commands} == {"specdec", "hf", "torchrun"}


def test_manifests_are_for_this_version() -> None:
    assert metadata.version("specdec") == VERSION


def closure(extra: str) -> dict[str, metadata.Distribution]:
    """The distributions that `pip install specdec[extra]` installs, by the installed metadata."""
    found: dict[str, metadata.Distribution] = {}
    pending = [Requirement(f"specdec[{extra}]")]
    seen = set()
    while pending:
        requirement = pending.pop()
        name = canonicalize_name(requirement.name)
        if (name, frozenset(requirement.extras)) in seen:
            continue
        seen.add((name, frozenset(requirement.extras)))
        found[name] = metadata.distribution(name)
        for text in found[name].requires or ():
            needed = Requirement(text)
            extras = requirement.extras or {""}
            if needed.marker is None or any(needed.marker.evaluate({"extra": e}) for e in extras):
                pending.append(needed)
    return found


def test_gateway_image_has_no_model_runtime() -> None:
    gateway = closure("gateway")
    assert gateway.keys() >= {"specdec", "grpcio", "tokenizers", "llguidance", "pydantic"}
    assert not gateway.keys() & MODEL_PACKAGES
    # What would be seen if it were otherwise.
    assert closure("verifier").keys() >= MODEL_PACKAGES


@pytest.mark.slow
def test_gateway_starts_from_a_venv_built_as_the_dockerfile_builds_it(tmp_path: Path) -> None:
    """Every RUN of the stage, with its folders moved, as it stands in the Dockerfile."""
    source, venv = tmp_path / "src", tmp_path / "venv"
    source.mkdir()
    for line in stages()["gateway-venv"]:
        if line.startswith("COPY --from=source"):
            copied = stages()["source"]
            names = [line.split()[1] for line in copied if line.startswith("COPY")]
            subprocess.run(["cp", "-r", *names, source], cwd=ROOT, check=True)
        elif line.startswith("COPY"):
            subprocess.run(["cp", *line.split()[1:-1], source], cwd=ROOT, check=True)
        elif line.startswith("RUN"):
            command = re.sub(r"--mount=\S+", "", line.removeprefix("RUN"))
            subprocess.run(
                ["sh", "-ec", command.replace("/opt/venv", str(venv))],
                cwd=source,
                env={"PATH": f"{venv / 'bin'}:{BIN}:/usr/bin:/bin", "HOME": str(tmp_path)},
                check=True,
            )
    python = venv / "bin" / "python"
    listed = subprocess.run(
        [python, "-m", "pip", "list", "--format", "json"], capture_output=True, check=True
    )
    installed = {canonicalize_name(package["name"]) for package in json.loads(listed.stdout)}
    assert installed - {"pip", "setuptools"} == closure("gateway").keys()
    size = sum(file.lstat().st_size for file in venv.rglob("*") if file.is_file()) / 1e6
    print(f"{size:.0f} MB")
    stated = re.search(r"environment of (\d+) MB", GUIDE.read_text(encoding="utf-8"))
    assert stated is not None
    assert size == pytest.approx(int(stated[1]), rel=0.1)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    program, *arguments = json.loads(last("ENTRYPOINT", "gateway"))
    command = [venv / "bin" / program, *arguments, f"--port={address.rpartition(':')[2]}"]
    with subprocess.Popen(command, env={}, cwd=tmp_path) as gateway:
        try:
            with grpc.insecure_channel(address) as channel:
                stub = health_pb2_grpc.HealthStub(channel)
                request = health_pb2.HealthCheckRequest()
                response = stub.Check(request, wait_for_ready=True, timeout=60)
            assert response.status == health_pb2.HealthCheckResponse.SERVING
        finally:
            gateway.terminate()
        assert gateway.wait(30) == 0
