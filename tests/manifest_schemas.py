"""What is wrong with the form of rendered manifests, by the schemas of Kubernetes and of CRDs."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path

import jsonschema
import kubernetes_validate

from tests.manifests import Document, workloads

KUBERNETES_VERSIONS = ("1.30", "1.34")
"""What the manifests are validated for: the oldest that they are for, and a new one."""

_CRDS = Path(__file__).with_name("crd_schemas")
"""Of the fields that are used here, because no package brings the schemas of these kinds."""


@lru_cache(maxsize=512)
def _schema_faults(text: str) -> tuple[str, ...]:
    document = json.loads(text)
    crd = _CRDS / f"{document['kind'].lower()}.json"
    try:
        if crd.is_file():
            jsonschema.validate(document, json.loads(crd.read_text()))
            core = [
                {"apiVersion": "v1", "kind": "PodTemplate", "template": workload.template}
                for workload in workloads([document])
            ]
        else:
            core = [document]
        for known, version in itertools.product(core, KUBERNETES_VERSIONS):
            kubernetes_validate.validate(known, version, strict=True)
    except jsonschema.ValidationError as error:
        where = "/".join(map(str, error.absolute_path))
        return (f"{document['kind']} {document['metadata']['name']}: {where}: {error.message}",)
    except kubernetes_validate.SchemaNotFoundError as error:
        return (error.message,)
    return ()


def schemas(documents: Sequence[Document]) -> Iterator[str]:
    """Fields that do not exist, or have values of another type."""
    for document in documents:
        yield from _schema_faults(json.dumps(document, sort_keys=True))
