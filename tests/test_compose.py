"""The compose files are valid, alone and one over the other, and mean what the services are."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from specdec import services
from tests.manifest_checks import VERSION, settings_of

ROOT = Path(__file__).parents[1]
MAIN = ROOT / "docker-compose.yml"
CPU = ROOT / "docker-compose.cpu.yml"
SECURE = ROOT / "docker-compose.secure.yml"
COMBINATIONS = {
    "gpus": (MAIN,),
    "cpu": (MAIN, CPU),
    "secure": (MAIN, SECURE),
    "cpu, secure": (MAIN, CPU, SECURE),
}
# Installed beside the interpreter by the development dependencies.
DOCKER_COMPOSE = Path(sys.executable).with_name("docker-compose")

Services = dict[str, dict[str, Any]]


def compose_config(*files: Path, options: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """Runs `docker-compose config`, which needs no daemon, without the caller's variables."""
    named = [part for file in files for part in ("--file", file)]
    return subprocess.run(
        [DOCKER_COMPOSE, *named, "--env-file", os.devnull, "config", *options],
        env={"PATH": os.defpath, "HOME": str(files[0].parent)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@lru_cache
def _configured(name: str) -> Services:
    result = compose_config(*COMBINATIONS[name], options=("--format", "json"))
    assert (result.returncode, result.stderr) == (0, "")
    config: dict[str, Services] = json.loads(result.stdout)
    return config["services"]


def configured(name: str) -> Services:
    """The services as compose understands them: anchors merged, variables filled in."""
    return deepcopy(_configured(name))


def seconds(duration: str) -> float:
    """Of a duration as compose writes it, for example 1m10s."""
    units = {"h": 3600, "m": 60, "s": 1}
    return sum(int(number) * units[unit] for number, unit in re.findall(r"(\d+)([hms])", duration))


def faults(found: Services) -> Iterator[str]:
    """What is wrong with what the files mean."""
    for name, service in found.items():
        confined = service.get("read_only") is True and service.get("cap_drop") == ["ALL"]
        if not confined or service.get("security_opt") != ["no-new-privileges:true"]:
            yield f"{name}: not confined"
        if service["image"].partition(":")[2] != VERSION:
            yield f"{name}: image {service['image']}"
        if f"specdec/{service['build']['target']}" != service["image"].partition(":")[0]:
            yield f"{name}: image {service['image']} of target {service['build']['target']}"
    for known in services.ALL:
        service = found[known.name]
        loaded = settings_of(known.name, service["environment"])
        if isinstance(loaded, str):
            yield f"{known.name}: {loaded}"
            continue
        if (loaded.host, loaded.port) != ("0.0.0.0", known.port):
            yield f"{known.name}: listens on {loaded.host}:{loaded.port}"
        port = loaded.port if loaded.tls_cert is None else loaded.health_port
        asks = ["CMD", "specdec", "health", known.name, f"--{known.name}", f"127.0.0.1:{port}"]
        if service["healthcheck"]["test"] != asks:
            yield f"{known.name}: its health is asked by {service['healthcheck']['test']}"
        if seconds(service["stop_grace_period"]) <= loaded.grace_seconds + 2:
            yield f"{known.name}: ends before its grace of {loaded.grace_seconds} s"
        secrets = {Path(secret["target"]) for secret in service.get("secrets", ())}
        used = {value for _, value in loaded if isinstance(value, Path)}
        if used != secrets:
            yield f"{known.name}: secrets {secrets ^ used}"


@pytest.mark.parametrize("name", COMBINATIONS)
def test_files_are_valid(name: str) -> None:
    result = compose_config(*COMBINATIONS[name], options=("--quiet",))
    assert (result.returncode, result.stderr) == (0, "")
    assert list(faults(configured(name))) == []


def test_unknown_key_makes_validation_fail(tmp_path: Path) -> None:
    broken = tmp_path / "docker-compose.yml"
    text, count = re.subn("    image: specdec/draft", "    imgae: specdec/draft", MAIN.read_text())
    assert count == 1
    broken.write_text(text)
    result = compose_config(broken, options=("--quiet",))
    assert result.returncode != 0
    assert "imgae" in result.stderr


PLANTED: dict[str, tuple[Callable[[Services], object], str]] = {
    "an image by no version": (
        lambda s: s["draft"].update(image="specdec/draft:latest"),
        "draft: image specdec/draft:latest",
    ),
    "another target": (
        lambda s: s["draft"]["build"].update(target="gateway"),
        "draft: image specdec/draft:0.1.0 of target gateway",
    ),
    "a setting that does not exist": (
        lambda s: s["gateway"]["environment"].update(SPECDEC_GATEWAY_PRT="1"),
        "SPECDEC_GATEWAY_PRT is no setting",
    ),
    "a health check of another port": (
        lambda s: s["draft"]["environment"].update(SPECDEC_DRAFT_HEALTH_PORT="50072"),
        "draft: its health is asked by",
    ),
    "a grace that is longer than compose waits": (
        lambda s: s["verifier"]["environment"].update(SPECDEC_VERIFIER_GRACE_SECONDS="68"),
        "verifier: ends before its grace of 68.0 s",
    ),
    "a file that is not mounted": (
        lambda s: s["verifier"]["secrets"].pop(),
        "verifier: secrets",
    ),
    "a root that is written to": (
        lambda s: s["gateway"].update(read_only=False),
        "gateway: not confined",
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_found(name: str) -> None:
    plant, complaint = PLANTED[name]
    found = configured("secure")
    plant(found)
    assert any(complaint in fault for fault in faults(found)), list(faults(found))


def device_ids(service: dict[str, Any]) -> list[str]:
    (device,) = service["deploy"]["resources"]["reservations"]["devices"]
    assert device["driver"] == "nvidia"
    assert device["capabilities"] == ["gpu"]
    ids: list[str] = device["device_ids"]
    return ids


def test_draft_and_verifier_have_a_gpu_each() -> None:
    found = configured("gpus")
    assert device_ids(found["draft"]) == ["0"]
    assert device_ids(found["verifier"]) == ["1"]
    assert "deploy" not in found["gateway"]
    for name in ("draft", "verifier"):
        assert found[name]["environment"][f"SPECDEC_{name.upper()}_DEVICE"] == "cuda"


def test_without_gpus_the_default_pair_is_pulled_first() -> None:
    found = configured("cpu")
    assert found["pull"]["entrypoint"] == ["specdec", "models", "pull"]
    for name in ("draft", "verifier"):
        assert "deploy" not in found[name]
        loaded = settings_of(name, found[name]["environment"])
        assert not isinstance(loaded, str)
        values = dict(loaded)
        assert (values["model"], values["device"]) == (None, "cpu")
        assert found[name]["depends_on"]["pull"]["condition"] == "service_completed_successfully"
        assert found[name]["volumes"] == found["pull"]["volumes"]


@pytest.mark.parametrize("name", COMBINATIONS)
def test_only_the_gateway_publishes_a_port(name: str) -> None:
    published = {
        name: [port["target"] for port in s["ports"]]
        for name, s in configured(name).items()
        if "ports" in s
    }
    assert published == {"gateway": [50051]}


@pytest.mark.parametrize("name", COMBINATIONS)
def test_gateway_finds_both_services_and_waits_for_the_verifier_alone(name: str) -> None:
    gateway = configured(name)["gateway"]
    loaded = dict(settings_of("gateway", gateway["environment"]))
    assert loaded["draft_address"] == [f"draft:{services.DRAFT.port}"]
    assert loaded["verifier_address"] == [f"verifier:{services.VERIFIER.port}"]
    conditions = {name: d["condition"] for name, d in gateway["depends_on"].items()}
    assert conditions == {"draft": "service_started", "verifier": "service_healthy"}


def test_with_tls_nothing_is_in_plaintext_but_health() -> None:
    found = configured("secure")
    gateway = dict(settings_of("gateway", found["gateway"]["environment"]))
    assert gateway["peer_tls_ca"] == gateway["tls_client_ca"] == Path("/run/secrets/ca.crt")
    assert gateway["keys_file"] is not None
    for name in ("draft", "verifier"):
        service = dict(settings_of(name, found[name]["environment"]))
        assert service["tls_client_ca"] == gateway["peer_tls_ca"]
        assert service["tls_client_names"] == ["spiffe://specdec/gateway"]
