"""The compose file is valid, and keeps the services apart as the design asks."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
COMPOSE_FILE = ROOT / "docker-compose.yml"
# Installed beside the interpreter by the development dependencies.
DOCKER_COMPOSE = Path(sys.executable).with_name("docker-compose")


def compose_config(file: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Runs `docker-compose config`, which needs no daemon, without the caller's variables."""
    return subprocess.run(
        [DOCKER_COMPOSE, "--file", file, "--env-file", os.devnull, "config", *options],
        env={"PATH": os.defpath, "HOME": str(file.parent)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.fixture(scope="module")
def services() -> dict[str, dict[str, Any]]:
    """The services as compose understands them: anchors merged, variables filled in."""
    result = compose_config(COMPOSE_FILE, "--format", "json")
    assert result.returncode == 0, result.stderr
    config: dict[str, dict[str, Any]] = json.loads(result.stdout)
    return config["services"]


def device_ids(service: dict[str, Any]) -> list[str]:
    (device,) = service["deploy"]["resources"]["reservations"]["devices"]
    assert device["driver"] == "nvidia"
    assert device["capabilities"] == ["gpu"]
    ids: list[str] = device["device_ids"]
    return ids


def test_compose_file_is_valid() -> None:
    result = compose_config(COMPOSE_FILE, "--quiet")
    assert (result.returncode, result.stderr) == (0, "")


def test_unknown_key_makes_validation_fail(tmp_path: Path) -> None:
    broken = tmp_path / "docker-compose.yml"
    text = COMPOSE_FILE.read_text(encoding="utf-8")
    assert text.count("    image: specdec/draft\n") == 1
    broken.write_text(text.replace("    image: specdec/draft\n", "    imgae: specdec/draft\n"))
    result = compose_config(broken, "--quiet")
    assert result.returncode != 0
    assert "imgae" in result.stderr


def test_draft_and_verifier_have_a_gpu_each(services: dict[str, dict[str, Any]]) -> None:
    assert device_ids(services["draft"]) == ["0"]
    assert device_ids(services["verifier"]) == ["1"]
    assert "deploy" not in services["gateway"]


@pytest.mark.parametrize("name", ["draft", "verifier", "gateway"])
def test_health_check_asks_the_port_that_the_service_listens_on(
    services: dict[str, dict[str, Any]], name: str
) -> None:
    check = services[name]["healthcheck"]["test"]
    (port,) = [part for part in services[name]["command"] if part.startswith("--port=")]
    address = f"127.0.0.1:{port.removeprefix('--port=')}"
    assert check == ["CMD", "specdec", "health", name, f"--{name}", address]


def test_only_the_gateway_publishes_a_port(services: dict[str, dict[str, Any]]) -> None:
    published = {
        name: [port["target"] for port in s.get("ports", [])] for name, s in services.items()
    }
    assert published == {"draft": [], "verifier": [], "gateway": [50051]}


def test_gateway_finds_both_services_and_waits_for_the_verifier_alone(
    services: dict[str, dict[str, Any]],
) -> None:
    gateway = services["gateway"]
    for name in ("draft", "verifier"):
        (port,) = [part for part in services[name]["command"] if part.startswith("--port=")]
        assert f"--{name}-address={name}:{port.removeprefix('--port=')}" in gateway["command"]
    conditions = {name: d["condition"] for name, d in gateway["depends_on"].items()}
    assert conditions == {"draft": "service_started", "verifier": "service_healthy"}


@pytest.mark.parametrize("name", ["draft", "verifier", "gateway"])
def test_service_runs_confined(services: dict[str, dict[str, Any]], name: str) -> None:
    assert services[name]["read_only"] is True
    assert services[name]["cap_drop"] == ["ALL"]
