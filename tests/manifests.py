"""The manifests of deploy/, rendered as kubectl and Helm do it, without a cluster."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

Document = dict[str, Any]

ROOT = Path(__file__).parents[1]
KUSTOMIZE = ROOT / "deploy" / "kustomize"
HELM = ROOT / "deploy" / "helm"
# Installed beside the interpreter by the development dependencies.
KUBECTL = Path(sys.executable).with_name("kubectl")

OVERLAYS = ("cpu-demo", "two-gpus", "multi-replica", "tensor-parallel")
ADDITIONS: dict[tuple[str, ...], dict[str, Any]] = {
    (): {},
    ("api-keys",): {"apiKeysSecret": "specdec-api-keys"},
    ("grpc-route",): {"grpcRoute": {"enabled": True}},
    ("mtls",): {"tls": {"services": True}},
    ("mtls", "gateway-tls"): {"tls": {"services": True, "clients": True}},
    ("mtls", "api-keys", "grpc-route"): {
        "tls": {"services": True},
        "apiKeysSecret": "specdec-api-keys",
        "grpcRoute": {"enabled": True},
    },
    ("mtls", "gateway-tls", "api-keys"): {
        "tls": {"services": True, "clients": True},
        "apiKeysSecret": "specdec-api-keys",
    },
}
"""Components that docs/deployment.md has one add to an overlay, and the values of the chart that
mean the same."""
COMBINATIONS = list(itertools.product(OVERLAYS, ADDITIONS))


def documents_of(text: str) -> list[Document]:
    """What is in a rendered text."""
    # The loader in C takes a tenth of the time.
    return [document for document in yaml.load_all(text, yaml.CSafeLoader) if document]


@lru_cache
def _kustomize(overlay: str, components: tuple[str, ...]) -> list[Document]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        base = os.path.relpath(KUSTOMIZE, folder.resolve())
        kustomization = {
            "apiVersion": "kustomize.config.k8s.io/v1beta1",
            "kind": "Kustomization",
            "namespace": "specdec",
            "resources": [f"{base}/overlays/{overlay}"],
            "components": [f"{base}/components/{component}" for component in components],
        }
        (folder / "kustomization.yaml").write_text(yaml.safe_dump(kustomization))
        result = subprocess.run(
            [KUBECTL, "kustomize", folder.resolve()],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert (result.returncode, result.stderr) == (0, "")
    return documents_of(result.stdout)


def kustomize(overlay: str, components: Sequence[str] = ()) -> list[Document]:
    """What `kubectl kustomize` makes of a user's overlay that adds components to one of ours."""
    return deepcopy(_kustomize(overlay, tuple(components)))


def helm(overlay: str, values: Mapping[str, Any]) -> list[Document]:
    """What `helm template specdec` makes of the chart, with the values of the overlay and more."""
    import helm_python

    own = yaml.safe_load((HELM / f"{overlay}.yaml").read_text(encoding="utf-8"))
    with helm_python.Chart.load(HELM / "specdec") as chart:
        files = chart.render({**own, **values}, name="specdec", namespace="specdec")
    texts = [text for name, text in files.items() if name.endswith(".yaml")]
    return [document for text in texts for document in documents_of(text)]


@dataclass(frozen=True)
class Workload:
    """Pods of one kind: a Deployment's, or one of the two kinds of a LeaderWorkerSet."""

    name: str
    """For messages."""
    labels: dict[str, str]
    template: Document
    """With the metadata and the spec of its pods."""

    @property
    def component(self) -> str:
        return self.labels["app.kubernetes.io/component"]

    @property
    def spec(self) -> Document:
        spec: Document = self.template["spec"]
        return spec

    @property
    def service(self) -> Document:
        """The container of the service itself."""
        (container,) = self.spec["containers"]
        found: Document = container
        return found

    @property
    def containers(self) -> list[Document]:
        return [*self.spec.get("initContainers", ()), *self.spec["containers"]]


def workloads(documents: Sequence[Document]) -> Iterator[Workload]:
    """All that make pods."""
    for document in documents:
        name = f"{document['kind']} {document['metadata']['name']}"
        if document["kind"] == "Deployment":
            template = document["spec"]["template"]
            yield Workload(name, template["metadata"]["labels"], template)
        if document["kind"] == "LeaderWorkerSet":
            group = document["spec"]["leaderWorkerTemplate"]
            for role in ("leader", "worker"):
                template = group[f"{role}Template"]
                yield Workload(f"{name} {role}", template["metadata"]["labels"], template)


def of_kind(documents: Sequence[Document], kind: str) -> list[Document]:
    return [document for document in documents if document["kind"] == kind]


def named(documents: Sequence[Document], kind: str, name: str) -> Document:
    (found,) = [d for d in of_kind(documents, kind) if d["metadata"]["name"] == name]
    return found


def environment(container: Document, documents: Sequence[Document]) -> dict[str, str]:
    """The variables of a container, with the values that ConfigMaps give them."""
    return _values(container.get("env", ()), documents)


def _values(variables: Sequence[Document], documents: Sequence[Document]) -> dict[str, str]:
    found: dict[str, str] = {}
    for variable in variables:
        source = variable.get("valueFrom", {})
        if "configMapKeyRef" in source:
            reference = source["configMapKeyRef"]
            config = named(documents, "ConfigMap", reference["name"])
            found[variable["name"]] = config["data"][reference["key"]]
        elif not source:
            found[variable["name"]] = variable["value"]
    return found


_HELMS_OWN = {"app.kubernetes.io/instance", "app.kubernetes.io/managed-by", "helm.sh/chart"}


def _plain(value: Any, documents: Sequence[Document]) -> Any:
    if isinstance(value, list):
        items = [_plain(item, documents) for item in value]
        items = [item for item in items if item is not None]
        by_name = all(isinstance(item, dict) and "name" in item for item in items)
        return sorted(items, key=lambda item: item["name"]) if by_name else items
    if not isinstance(value, dict):
        return value
    if value.get("key") in _HELMS_OWN:
        return None
    if "configMapKeyRef" in value.get("valueFrom", {}):
        return {"name": value["name"], "value": _values([value], documents)[value["name"]]}
    return {key: _plain(v, documents) for key, v in value.items() if key not in _HELMS_OWN}


def comparable(documents: Sequence[Document]) -> dict[str, Document]:
    """Documents by kind and name, less what kustomize and Helm do in ways of their own.

    That is the namespace, which Helm takes from the command line; labels of the release; and the
    names of the models, which have a ConfigMap with kustomize, so that one patch sets them.
    """
    found = {}
    for document in documents:
        if document["kind"] not in {"Namespace", "ConfigMap"}:
            plain = _plain(document, documents)
            plain["metadata"].pop("namespace", None)
            found[f"{document['kind']} {document['metadata']['name']}"] = plain
    return found
