"""Code that lies among a model's files is not run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from specdec.lm.architecture import ModelLoadError
from specdec.lm.loading import load
from specdec.lm.tokenizer_loading import load_tokenizer


def test_a_models_own_code_is_not_run_and_nobody_is_asked(
    target_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, trace = tmp_path / "model", tmp_path / "was-run"
    shutil.copytree(target_folder, folder)
    config = json.loads((folder / "config.json").read_text())
    config["model_type"] = "its-own"
    config["auto_map"] = {"AutoConfig": "its_own.Config", "AutoModelForCausalLM": "its_own.Model"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "its_own.py").write_text(f"open({str(trace)!r}, 'w').close()\n")
    monkeypatch.setattr("builtins.input", lambda _="": "y")
    for read in (load, load_tokenizer):
        with pytest.raises(ModelLoadError, match="custom code"):
            read(str(folder))
    assert not trace.exists()


def test_pickled_weights_are_not_read(target_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(target_folder, folder)
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(weights, folder / "pytorch_model.bin")
    with pytest.raises(ModelLoadError, match="safetensors"):
        load(str(folder))
