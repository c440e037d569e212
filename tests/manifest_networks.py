"""Who can connect to whom, as the network policies of rendered manifests have it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from specdec import services
from tests.manifests import Document, of_kind, workloads


def selects(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """Whether a label selector selects what has these labels."""
    return selector.get("matchLabels", {}).items() <= labels.items() and all(
        expression["operator"] == "In" and labels.get(expression["key"]) in expression["values"]
        for expression in selector.get("matchExpressions", ())
    )


def connections(documents: Sequence[Document]) -> set[tuple[str, str, int | None]]:
    """Who may connect to whom, by which port (None: by all), as network policies have it.

    Components, and "client" for what the gateway is there for.
    """
    pods = {workload.component: workload.labels for workload in workloads(documents)}
    pods["client"] = {"specdec-client": "true"}
    policies = [policy["spec"] for policy in of_kind(documents, "NetworkPolicy")]

    def allowed(way: str, subject: str, other: str) -> set[int | None]:
        mine = [p for p in policies if way in p["policyTypes"]]
        mine = [p for p in mine if selects(p["podSelector"], pods[subject])]
        if not mine:
            return {None}
        end = {"Ingress": "from", "Egress": "to"}[way]
        return {
            port
            for policy in mine
            for rule in policy.get(way.lower(), ())
            if any(
                "podSelector" in peer
                and "namespaceSelector" not in peer
                and selects(peer["podSelector"], pods[other])
                for peer in rule[end]
            )
            for port in ([p["port"] for p in rule["ports"]] if "ports" in rule else [None])
        }

    found = set()
    for source in pods:
        for target in pods:
            out, into = allowed("Egress", source, target), allowed("Ingress", target, source)
            both = out & into | (out if None in into else set()) | (into if None in out else set())
            found |= {(source, target, port) for port in both}
    return found


def only_the_gateway_connects(documents: Sequence[Document]) -> Iterator[str]:
    """Clients to the gateway, the gateway to its services, and within a group of the verifier."""
    expected: set[tuple[str, str, int | None]] = {
        ("client", "gateway", services.GATEWAY.port),
        ("gateway", "draft", services.DRAFT.port),
        ("gateway", "verifier", services.VERIFIER.port),
        ("client", "client", None),
    }
    components = {workload.component for workload in workloads(documents)}
    if "verifier-worker" in components:
        group = ("verifier", "verifier-worker")
        expected |= {(source, target, None) for source in group for target in group}
    for source, target, port in sorted(connections(documents) ^ expected, key=str):
        yield f"network policies: {source} to {target} by {port}"
