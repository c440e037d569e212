"""The models of the conformance suite."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.models import make_model


@pytest.fixture(scope="session")
def near_folder(tmp_path_factory: pytest.TempPathFactory, target_folder: Path) -> Path:
    """A draft of which the target accepts about half at temperature 0."""
    folder = tmp_path_factory.mktemp("near") / "model"
    return make_model(folder, seed=2, rows=300, near=target_folder, noise=0.03)


@pytest.fixture(scope="session")
def stranger_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft that has nothing to do with the target."""
    return make_model(tmp_path_factory.mktemp("stranger") / "model", seed=99, rows=300)
