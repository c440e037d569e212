"""What all tests share."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from gateway.breaker import Breaker
from tests.models import make_model


@pytest_asyncio.fixture(autouse=True)
async def no_lost_exceptions() -> AsyncIterator[None]:
    """Fails a test whose event loop had to report an error that nobody awaited."""
    reported: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))
    yield
    assert not reported, reported


@pytest.fixture
def forgiving(monkeypatch: pytest.MonkeyPatch) -> None:
    """Circuit breakers of endpoints never open. Those of sessions do.

    For tests in which a draft fails in one generation, and is to be used in the next.
    """

    class OfSession(Breaker):
        failed = Breaker.failed

    monkeypatch.setattr("gateway.draft_source.Breaker", OfSession)
    monkeypatch.setattr(Breaker, "failed", lambda breaker, reason: None)


@pytest.fixture(scope="session")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny target with a byte-level tokenizer of 300 entries."""
    return make_model(tmp_path_factory.mktemp("target") / "model", seed=1, rows=300)


@pytest.fixture(scope="session")
def draft_folder(tmp_path_factory: pytest.TempPathFactory, target_folder: Path) -> Path:
    """A tiny draft that often agrees with the target."""
    folder = tmp_path_factory.mktemp("draft") / "model"
    return make_model(folder, seed=2, rows=300, near=target_folder, noise=0.05)
