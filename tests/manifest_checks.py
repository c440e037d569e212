"""What is wrong with rendered manifests, by what the services are.

Each check takes all documents of a deployment and gives a line for each fault.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any
from unittest import mock

from draft_service.settings import DraftSettings
from gateway.settings import GatewaySettings
from specdec import services, settings
from specdec.settings import ServiceSettings
from tests.manifest_networks import only_the_gateway_connects, selects
from tests.manifest_schemas import schemas
from tests.manifests import Document, Workload, environment, of_kind, workloads
from verifier_service.settings import VerifierSettings

VERSION = "0.1.0"

_SERVICES = {service.name: service for service in services.ALL}
_SETTINGS: dict[str, type[ServiceSettings]] = {
    "draft": DraftSettings,
    "gateway": GatewaySettings,
    "verifier": VerifierSettings,
}
_LAST_SECONDS = 2
"""A service ends at the latest so long after its grace."""
_TORCHRUN_SECONDS = 30
"""torchrun kills what is left so long after SIGTERM."""


@lru_cache(maxsize=512)
def _load(service: str, variables: frozenset[tuple[str, str]]) -> ServiceSettings | str:
    with mock.patch.dict(os.environ, variables, clear=True):
        try:
            return settings.load(_SETTINGS[service], [])
        except SystemExit as refusal:
            return str(refusal)


def settings_of(service: str, variables: Mapping[str, str]) -> ServiceSettings | str:
    """What a service has for settings with these variables, or says instead of starting."""
    return _load(service, frozenset(variables.items()))


def _settings(workload: Workload, documents: Sequence[Document]) -> ServiceSettings | str:
    """The settings that a service has in its container, or what it says instead of starting."""
    return settings_of(workload.service["name"], environment(workload.service, documents))


def _serves(workload: Workload) -> bool:
    return workload.component in _SERVICES


def _loaded(documents: Sequence[Document]) -> Iterator[tuple[Workload, ServiceSettings]]:
    """The settings of those that start."""
    for workload in workloads(documents):
        loaded = _settings(workload, documents)
        if not isinstance(loaded, str):
            yield workload, loaded


def settings_are_known(documents: Sequence[Document]) -> Iterator[str]:
    """The services start with their variables; no other variable looks like a setting."""
    for workload in workloads(documents):
        loaded = _settings(workload, documents)
        if isinstance(loaded, str):
            yield f"{workload.name}: {loaded}"
        if "args" in workload.service:
            yield f"{workload.name}: settings are variables, which patches merge by name"
        own = f"SPECDEC_{workload.service['name'].upper()}_"
        for name in environment(workload.service, documents):
            if name.startswith("SPECDEC_") and not name.startswith(own):
                yield f"{workload.name}: {name} is of another service"


def ports_and_probes(documents: Sequence[Document]) -> Iterator[str]:
    """Services listen where they are known to, are asked for what they answer, and in plaintext."""
    for workload, loaded in _loaded(documents):
        container = workload.service
        probes = {n: container.get(f"{n}Probe") for n in ("startup", "liveness", "readiness")}
        if not _serves(workload):
            if any(probes.values()) or container.get("ports"):
                yield f"{workload.name}: nothing listens there"
            continue
        service = _SERVICES[workload.component]
        plain = loaded.port if loaded.tls_cert is None else loaded.health_port
        listens = {loaded.port} | ({loaded.health_port} - {None})
        if loaded.port != service.port or loaded.host != "0.0.0.0":
            yield f"{workload.name}: listens on {loaded.host}:{loaded.port}"
        if {port["containerPort"] for port in container["ports"]} != listens:
            yield f"{workload.name}: its ports are {listens}"
        for name, probe in probes.items():
            asked = "" if name != "readiness" else service.full_name
            if probe is None or "grpc" not in probe:
                yield f"{workload.name}: no {name} probe by gRPC"
            elif (probe["grpc"]["port"], probe["grpc"].get("service", "")) != (plain, asked):
                yield f"{workload.name}: the {name} probe is to ask {plain} for {asked!r}"
            elif not 2 <= probe.get("timeoutSeconds", 1) <= probe["periodSeconds"]:
                yield f"{workload.name}: the time-out of the {name} probe"


def grace_adds_up(documents: Sequence[Document]) -> Iterator[str]:
    """Kubernetes kills no pod that is still within its grace."""
    for workload, loaded in _loaded(documents):
        pause = workload.service["lifecycle"]["preStop"]["sleep"]["seconds"]
        needed = loaded.grace_seconds + _LAST_SECONDS
        if workload.spec["terminationGracePeriodSeconds"] <= pause + needed:
            yield f"{workload.name}: ends before its grace of {loaded.grace_seconds} s"
        if "torchrun" in workload.service.get("command", ()) and needed >= _TORCHRUN_SECONDS:
            yield f"{workload.name}: torchrun ends it before its grace"


def confinement(documents: Sequence[Document]) -> Iterator[str]:
    """The restricted profile, a read-only root, resources, and images of this version."""
    for workload in workloads(documents):
        spec, name = workload.spec, workload.name
        security = spec["securityContext"]
        if not security["runAsNonRoot"] or security["runAsUser"] != 10001:
            yield f"{name}: may run as root"
        if security["seccompProfile"] != {"type": "RuntimeDefault"}:
            yield f"{name}: no seccomp profile"
        if spec.get("automountServiceAccountToken") is not False:
            yield f"{name}: has a token"
        if spec.get("enableServiceLinks") is not False:
            yield f"{name}: variables of Services would be refused as settings"
        for container in workload.containers:
            where = f"{name} {container['name']}"
            if container.get("securityContext") != {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }:
                yield f"{where}: not confined"
            resources = container.get("resources", {})
            if not {"cpu", "memory"} <= set(resources.get("requests", ())):
                yield f"{where}: no requests"
            if "memory" not in resources.get("limits", ()):
                yield f"{where}: no limit of memory"
            image, _, tag = container["image"].partition(":")
            if tag != VERSION or image not in {f"specdec/{service}" for service in _SERVICES}:
                yield f"{where}: image {container['image']}"
            if container["name"] in _SERVICES and image != f"specdec/{container['name']}":
                yield f"{where}: image {container['image']}"
            mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
            if "/tmp" not in mounts or (not image.endswith("/gateway") and "/cache" not in mounts):
                yield f"{where}: /tmp or /cache cannot be written"


def gpus(documents: Sequence[Document]) -> Iterator[str]:
    """Who asks for a GPU uses it, and the other way round."""
    for workload in workloads(documents):
        container = workload.service
        count = container["resources"]["limits"].get("nvidia.com/gpu", 0)
        if "command" in container:
            # torchrun starts a process for each, which takes the one of its rank.
            uses = "--nproc-per-node=gpu" in container["command"]
        else:
            setting = f"SPECDEC_{container['name'].upper()}_DEVICE"
            uses = environment(container, documents).get(setting) == "cuda"
        if uses != (count > 0):
            yield f"{workload.name}: {count} GPUs, which it {'uses' if uses else 'does not use'}"
    for group in of_kind(documents, "LeaderWorkerSet"):
        pods = [workload.service["resources"]["limits"] for workload in workloads([group])]
        if len({limits["nvidia.com/gpu"] for limits in pods}) != 1:
            yield f"{group['metadata']['name']}: its pods have different numbers of GPUs"


def _selectors(documents: Sequence[Document]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """All that are to find pods of this deployment."""
    for document in documents:
        name, spec = f"{document['kind']} {document['metadata']['name']}", document.get("spec", {})
        match document["kind"]:
            case "Service":
                yield name, {"matchLabels": spec["selector"]}
            case "PodDisruptionBudget":
                yield name, spec["selector"]
            case "NetworkPolicy":
                yield name, spec["podSelector"]
                for rule in (*spec.get("ingress", ()), *spec.get("egress", ())):
                    for peer in (*rule.get("from", ()), *rule.get("to", ())):
                        selector = peer.get("podSelector", {})
                        outside = "namespaceSelector" in peer or "ipBlock" in peer
                        if not outside and "specdec-client" not in selector.get("matchLabels", {}):
                            yield name, selector
    for workload in workloads(documents):
        for spread in workload.spec.get("topologySpreadConstraints", ()):
            yield f"{workload.name}: spread", spread["labelSelector"]
        near = workload.spec.get("affinity", {}).get("podAffinity", {})
        for term in near.get("requiredDuringSchedulingIgnoredDuringExecution", ()):
            yield f"{workload.name}: affinity", term["labelSelector"]
        for term in near.get("preferredDuringSchedulingIgnoredDuringExecution", ()):
            yield f"{workload.name}: affinity", term["podAffinityTerm"]["labelSelector"]


def selectors_find_pods(documents: Sequence[Document]) -> Iterator[str]:
    found = list(workloads(documents))
    for name, selector in _selectors(documents):
        if not any(selects(selector, workload.labels) for workload in found):
            yield f"{name}: selects no pod"
    for document in of_kind(documents, "Deployment"):
        labels = document["spec"]["template"]["metadata"]["labels"]
        if not selects(document["spec"]["selector"], labels):
            yield f"Deployment {document['metadata']['name']}: does not select its own pods"


def names_exist(documents: Sequence[Document]) -> Iterator[str]:
    """What is referred to is there, or is for the operator to make, as the guide says."""
    have = {(document["kind"], document["metadata"]["name"]) for document in documents}
    have |= {("Secret", c["spec"]["secretName"]) for c in of_kind(documents, "Certificate")}
    have |= {("Secret", "specdec-api-keys"), ("Secret", "specdec-hub-token")}
    wanted: set[tuple[str, str]] = set()
    for workload in workloads(documents):
        wanted.add(("ServiceAccount", workload.spec["serviceAccountName"]))
        for volume in workload.spec["volumes"]:
            if "persistentVolumeClaim" in volume:
                wanted.add(("PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"]))
            if "secret" in volume:
                wanted.add(("Secret", volume["secret"]["secretName"]))
        for container in workload.containers:
            for source in (v.get("valueFrom", {}) for v in container.get("env", ())):
                if "secretKeyRef" in source:
                    wanted.add(("Secret", source["secretKeyRef"]["name"]))
    for issued in (*of_kind(documents, "Certificate"), *of_kind(documents, "Issuer")):
        spec = issued["spec"]
        if "issuerRef" in spec:
            wanted.add((spec["issuerRef"]["kind"], spec["issuerRef"]["name"]))
        if "ca" in spec:
            wanted.add(("Secret", spec["ca"]["secretName"]))
    for route in of_kind(documents, "GRPCRoute"):
        backends = [b for rule in route["spec"]["rules"] for b in rule["backendRefs"]]
        wanted |= {("Service", backend["name"]) for backend in backends}
    yield from (f"there is no {kind} {name}" for kind, name in sorted(wanted - have))


def addresses(documents: Sequence[Document]) -> Iterator[str]:
    """The gateway's addresses are headless Services, whose certificates are for those names."""
    ports = {
        (document["metadata"]["name"], port["port"]): document["spec"]
        for document in of_kind(documents, "Service")
        for port in document["spec"]["ports"]
    }
    names = {
        name for c in of_kind(documents, "Certificate") for name in c["spec"].get("dnsNames", ())
    }
    for (name, port), spec in ports.items():
        if spec["ports"][0]["targetPort"] != port:
            yield f"Service {name}: another port than its pods"
    for workload, loaded in _loaded(documents):
        if not isinstance(loaded, GatewaySettings):
            continue
        for address in (*loaded.verifier_address, *loaded.draft_address):
            host, _, port = address.removeprefix("dns:").rpartition(":")
            if ports.get((host, int(port)), {}).get("clusterIP") != "None":
                yield f"{workload.name}: {address} is no headless Service"
            if loaded.peer_tls_ca is not None and host not in names:
                yield f"{workload.name}: no certificate is for {host}"


def tls_fits(documents: Sequence[Document]) -> Iterator[str]:
    """Files are of mounted Secrets; both ends speak TLS or neither; the gateway is let in."""
    found = {workload.component: loaded for workload, loaded in _loaded(documents)}
    gateway = found.get("gateway")
    if isinstance(gateway, GatewaySettings):
        for name in ("draft", "verifier"):
            service = found.get(name)
            if service is None:
                continue
            if (service.tls_cert is None) != (gateway.peer_tls_ca is None):
                yield f"gateway and {name} do not both speak TLS"
            uris = [
                uri
                for certificate in of_kind(documents, "Certificate")
                if certificate["spec"]["secretName"] == "specdec-gateway-tls"
                for uri in certificate["spec"]["uris"]
            ]
            if service.tls_client_names and not set(service.tls_client_names) & set(uris):
                yield f"{name} does not let the gateway in"
    for workload, loaded in _loaded(documents):
        mounts = [Path(mount["mountPath"]) for mount in workload.service["volumeMounts"]]
        for setting, value in loaded:
            if isinstance(value, Path) and value.parent not in mounts:
                yield f"{workload.name}: {setting} {value} is not mounted"


CHECKS: tuple[Callable[[Sequence[Document]], Iterator[str]], ...] = (
    settings_are_known,
    ports_and_probes,
    grace_adds_up,
    confinement,
    gpus,
    selectors_find_pods,
    names_exist,
    addresses,
    tls_fits,
    only_the_gateway_connects,
)


def faults(documents: Sequence[Document]) -> list[str]:
    """What is wrong with a deployment: its form or, if that is right, its meaning."""
    return list(schemas(documents)) or [f for check in CHECKS for f in check(documents)]
