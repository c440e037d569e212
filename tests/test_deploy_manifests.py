"""Every documented combination of the manifests is valid, and means what the services are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.manifest_checks import faults
from tests.manifests import COMBINATIONS, Document, kustomize, named


@pytest.mark.parametrize(
    ("overlay", "components"), COMBINATIONS, ids=["+".join((o, *c)) for o, c in COMBINATIONS]
)
def test_what_the_guide_describes_is_valid(overlay: str, components: tuple[str, ...]) -> None:
    documents = kustomize(overlay, components)
    assert len(documents) >= 16
    assert faults(documents) == []


def container(documents: list[Document], name: str) -> Any:
    return named(documents, "Deployment", f"specdec-{name}")["spec"]["template"]["spec"][
        "containers"
    ][0]


def pod(documents: list[Document], name: str) -> Any:
    return named(documents, "Deployment", f"specdec-{name}")["spec"]["template"]["spec"]


def set_variable(documents: list[Document], name: str, variable: str, value: str) -> None:
    env = container(documents, name)["env"]
    env[:] = [entry for entry in env if entry["name"] != variable]
    env.append({"name": variable, "value": value})


def policy(documents: list[Document], name: str) -> Any:
    return named(documents, "NetworkPolicy", f"specdec-{name}")["spec"]


PLANTED: dict[str, tuple[Callable[[list[Document]], object], str]] = {
    "a key that does not exist": (
        lambda d: pod(d, "draft").update(nodeSelectors={}),
        "'nodeSelectors' was unexpected",
    ),
    "a value of another type": (
        lambda d: named(d, "Deployment", "specdec-draft")["spec"].update(replicas="two"),
        "'two' is not of type",
    ),
    "a variable that is no string": (
        lambda d: container(d, "draft")["env"].append({"name": "X", "value": 1}),
        "1 is not of type",
    ),
    "a probe of a named port": (
        lambda d: container(d, "gateway")["livenessProbe"]["grpc"].update(port="grpc"),
        "'grpc' is not of type 'integer'",
    ),
    "a certificate with a misspelt field": (
        lambda d: named(d, "Certificate", "specdec-draft")["spec"].update(dnsName=["x"]),
        "'dnsName' was unexpected",
    ),
    "a kind that nobody knows": (
        lambda d: named(d, "Service", "specdec-draft").update(kind="Servize"),
        "Servize",
    ),
    "a readiness probe for another service": (
        lambda d: container(d, "draft")["readinessProbe"]["grpc"].update(
            service="specdec.v1.Draft"
        ),
        "the readiness probe is to ask 50062",
    ),
    "a probe that would have to speak TLS": (
        lambda d: container(d, "verifier")["startupProbe"]["grpc"].update(port=50053),
        "the startup probe is to ask 50063",
    ),
    "no time for an answer": (
        lambda d: container(d, "verifier")["livenessProbe"].pop("timeoutSeconds"),
        "the time-out of the liveness probe",
    ),
    "an image by no version": (
        lambda d: container(d, "gateway").update(image="specdec/gateway:latest"),
        "image specdec/gateway:latest",
    ),
    "a setting that does not exist": (
        lambda d: set_variable(d, "gateway", "SPECDEC_GATEWAY_MAX_SESION", "1"),
        "SPECDEC_GATEWAY_MAX_SESION is no setting",
    ),
    "a setting of another service": (
        lambda d: set_variable(d, "gateway", "SPECDEC_DRAFT_MODEL", "x"),
        "SPECDEC_DRAFT_MODEL is of another service",
    ),
    "a setting with a wrong value": (
        lambda d: set_variable(d, "verifier", "SPECDEC_VERIFIER_GRACE_SECONDS", "long"),
        "grace_seconds: Input should be a valid number",
    ),
    "another port": (
        lambda d: set_variable(d, "verifier", "SPECDEC_VERIFIER_PORT", "50054"),
        "listens on 0.0.0.0:50054",
    ),
    "a grace that is longer than the pod's": (
        lambda d: set_variable(d, "gateway", "SPECDEC_GATEWAY_GRACE_SECONDS", "68"),
        "ends before its grace of 68.0 s",
    ),
    "a root that is written to": (
        lambda d: container(d, "draft")["securityContext"].update(readOnlyRootFilesystem=False),
        "specdec-draft draft: not confined",
    ),
    "an init container without resources": (
        lambda d: pod(d, "verifier")["initContainers"][0].pop("resources"),
        "specdec-verifier download: no requests",
    ),
    "variables of Services": (
        lambda d: pod(d, "gateway").pop("enableServiceLinks"),
        "variables of Services",
    ),
    "a token": (lambda d: pod(d, "gateway").pop("automountServiceAccountToken"), "has a token"),
    "a GPU that is not used": (
        lambda d: set_variable(d, "draft", "SPECDEC_DRAFT_DEVICE", "cpu"),
        "1 GPUs, which it does not use",
    ),
    "a disruption budget of nothing": (
        lambda d: named(d, "PodDisruptionBudget", "specdec-draft")["spec"]["selector"][
            "matchLabels"
        ].update({"app.kubernetes.io/component": "drafts"}),
        "PodDisruptionBudget specdec-draft: selects no pod",
    ),
    "a Deployment that does not find its pods": (
        lambda d: named(d, "Deployment", "specdec-draft")["spec"]["selector"]["matchLabels"].update(
            {"app.kubernetes.io/component": "verifier"}
        ),
        "does not select its own pods",
    ),
    "a volume that is not there": (
        lambda d: named(d, "PersistentVolumeClaim", "specdec-model-cache")["metadata"].update(
            name="weights"
        ),
        "there is no PersistentVolumeClaim specdec-model-cache",
    ),
    "an address without a Service": (
        lambda d: set_variable(
            d, "gateway", "SPECDEC_GATEWAY_DRAFT_ADDRESS", "dns:specdec-drafts:50052"
        ),
        "dns:specdec-drafts:50052 is no headless Service",
    ),
    "a certificate for another name": (
        lambda d: named(d, "Certificate", "specdec-draft")["spec"].update(dnsNames=["draft"]),
        "no certificate is for specdec-draft",
    ),
    "a gateway that is not let in": (
        lambda d: set_variable(d, "draft", "SPECDEC_DRAFT_TLS_CLIENT_NAMES", "gateway"),
        "draft does not let the gateway in",
    ),
    "a key that is not mounted": (
        lambda d: container(d, "gateway").update(
            volumeMounts=[m for m in container(d, "gateway")["volumeMounts"] if m["name"] != "tls"]
        ),
        "tls_key /etc/specdec/tls/tls.key is not mounted",
    ),
    "a gateway that may call anyone": (
        lambda d: policy(d, "gateway")["egress"].append({"to": [{"podSelector": {}}]}),
        "network policies: gateway to client",
    ),
    "a draft that anyone reaches": (
        lambda d: policy(d, "draft")["ingress"][0].update({"from": [{"podSelector": {}}]}),
        "network policies: client to draft by 50052",
    ),
    "a policy for a port that is not served": (
        lambda d: policy(d, "verifier")["ingress"][0]["ports"][0].update(port=50063),
        "network policies: gateway to verifier by 50053",
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_found(name: str) -> None:
    plant, complaint = PLANTED[name]
    documents = kustomize("two-gpus", ("mtls", "gateway-tls", "api-keys"))
    plant(documents)
    assert any(complaint in fault for fault in faults(documents)), faults(documents)


def leader(documents: list[Document]) -> Any:
    group = named(documents, "LeaderWorkerSet", "specdec-verifier")["spec"]["leaderWorkerTemplate"]
    return group["leaderTemplate"]["spec"]


IN_GROUPS: dict[str, tuple[Callable[[list[Document]], object], str]] = {
    "a field of the set that does not exist": (
        lambda d: named(d, "LeaderWorkerSet", "specdec-verifier")["spec"].update(size=2),
        "'size' was unexpected",
    ),
    "a field of its pods that does not exist": (
        lambda d: leader(d)["containers"][0].update(arg=[]),
        "'arg' was unexpected",
    ),
    "pods with different numbers of GPUs": (
        lambda d: leader(d)["containers"][0]["resources"]["limits"].update({"nvidia.com/gpu": 8}),
        "its pods have different numbers of GPUs",
    ),
    "a grace that torchrun does not wait for": (
        lambda d: (
            leader(d).update(terminationGracePeriodSeconds=99)
            or leader(d)["containers"][0]["env"].append(
                {"name": "SPECDEC_VERIFIER_GRACE_SECONDS", "value": "60"}
            )
        ),
        "torchrun ends it before its grace",
    ),
}


@pytest.mark.parametrize("name", IN_GROUPS)
def test_a_fault_planted_in_a_group_of_pods_is_found(name: str) -> None:
    plant, complaint = IN_GROUPS[name]
    documents = kustomize("tensor-parallel")
    plant(documents)
    assert any(complaint in fault for fault in faults(documents)), faults(documents)
