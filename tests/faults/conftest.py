"""What tests of faults share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog

from tests.faults.attack import VOCABULARY
from tests.faults.storm import CONTEXT
from tests.models import byte_tokens, make_model

_ERRORS = ("error", "exception", "critical")


@pytest.fixture(scope="session")
def short_models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target and a draft with a short context, whose embeddings have more rows than tokens."""
    folder, table = tmp_path_factory.mktemp("short"), byte_tokens(VOCABULARY)
    shape: dict[str, Any] = {"rows": 320, "table": table, "context": CONTEXT}
    target = make_model(folder / "target", seed=1, **shape)
    return target, make_model(folder / "draft", seed=2, near=target, noise=0.05, **shape)


@pytest.fixture
def no_errors_in_the_log() -> Iterator[None]:
    """Fails a test in which a service logs an error. Nothing else is logged.

    What a peer says of itself may well make a gateway log one.
    """
    errors: list[Any] = []

    def keep(_: Any, method: str, event: Any) -> Any:
        if method in _ERRORS and event["event"] != "handshake failed":
            errors.append(event)
        raise structlog.DropEvent

    before = structlog.get_config()
    structlog.configure(processors=[keep])
    yield
    structlog.configure(**before)
    assert not errors, errors[:3]
