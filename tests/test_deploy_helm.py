"""The chart makes the same of its values as kustomize of the overlays. It is rendered by Helm."""

from __future__ import annotations

from typing import Any

import pytest

from tests.manifest_checks import VERSION, faults
from tests.manifests import ADDITIONS, COMBINATIONS, HELM, comparable, helm, kustomize, named

# Where there is no build of it, the chart goes unchecked.
helm_python = pytest.importorskip("helm_python")

CHART = HELM / "specdec"


@pytest.mark.parametrize(
    ("overlay", "components"), COMBINATIONS, ids=["+".join((o, *c)) for o, c in COMBINATIONS]
)
def test_chart_and_overlay_are_the_same(overlay: str, components: tuple[str, ...]) -> None:
    rendered = helm(overlay, ADDITIONS[components])
    assert comparable(rendered) == comparable(kustomize(overlay, components))


def test_what_differs_is_seen() -> None:
    rendered = comparable(helm("two-gpus", {}))
    other = comparable(kustomize("multi-replica"))
    assert rendered.keys() == other.keys()
    differ = {name for name in rendered if rendered[name] != other[name]}
    assert differ == {
        "Deployment specdec-draft",
        "Deployment specdec-gateway",
        "Deployment specdec-verifier",
        "PersistentVolumeClaim specdec-model-cache",
    }


def test_helm_finds_nothing_to_complain_of() -> None:
    report = helm_python.lint(CHART, strict=True)
    assert report["errors"] == []
    assert [m["error"] for m in report["messages"]] == ["icon is recommended"]
    with helm_python.Chart.load(CHART) as chart:
        assert chart.version == chart.metadata["appVersion"] == VERSION


def test_settings_reach_the_service_by_the_name_of_their_flag() -> None:
    rendered = helm("two-gpus", {"gateway": {"settings": {"max-sessions": 64, "adaptive": False}}})
    assert faults(rendered) == []
    container = named(rendered, "Deployment", "specdec-gateway")["spec"]["template"]["spec"][
        "containers"
    ][0]
    env = {variable["name"]: variable["value"] for variable in container["env"]}
    assert env["SPECDEC_GATEWAY_MAX_SESSIONS"] == "64"
    assert env["SPECDEC_GATEWAY_ADAPTIVE"] == "false"
    broken = helm("two-gpus", {"gateway": {"settings": {"max-sesions": 64}}})
    assert any("SPECDEC_GATEWAY_MAX_SESIONS is no setting" in fault for fault in faults(broken))


def test_without_network_policies_there_are_none() -> None:
    rendered = helm("tensor-parallel", {"networkPolicies": {"enabled": False}})
    assert [d for d in rendered if d["kind"] == "NetworkPolicy"] == []


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "a name that is misspelt": ({"gatway": {}}, "gatway"),
    "a name within that is misspelt": ({"draft": {"replica": 2}}, "replica"),
    "a value of another type": ({"draft": {"gpus": "1"}}, "/draft/gpus"),
    "an image by no version": ({"image": {"tag": "latest"}}, "/image/tag"),
    "half a pair": ({"models": {"target": "", "draft": "x"}}, "/models"),
    "a grace that torchrun does not wait for": (
        {"verifier": {"tensorParallel": {"enabled": True}, "graceSeconds": 60}},
        "/verifier/graceSeconds",
    ),
    "TLS with clients alone": ({"tls": {"clients": True}}, "tls.clients needs tls.services"),
    "TLS behind a route that ends it": (
        {"tls": {"services": True, "clients": True}, "grpcRoute": {"enabled": True}},
        "tls.clients and grpcRoute exclude each other",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_values_are_refused(name: str) -> None:
    values, complaint = WRONG[name]
    with pytest.raises(helm_python.HelmError, match=complaint):
        helm("two-gpus", values)
