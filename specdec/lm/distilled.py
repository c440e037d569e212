"""Distilled drafts: a few layers and a small head, in a folder that names the rest.

Embeddings and tokenizer are the base model's, which the draft was distilled from. They are most of
a small model's bytes and the same in both, so that only the base's folder holds them.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils.hub import cached_file

from specdec.lm.architecture import ModelLoadError
from specdec.models.cache import DEFAULT_TARGET_NAME, default_target_path, is_pulled

SECTION = "specdec_draft"
"""Of config.json."""
WEIGHTS = "model.safetensors"
PROJECTION = "embedding_projection.weight"
_INDEX = "model.safetensors.index.json"


class Base(NamedTuple):
    """Which model a draft was distilled from, and what is read from its files."""

    model_id: str
    """A folder, a hub id, or the name of the default target."""
    revision: str | None
    """Of the hub id."""
    embedding: str
    """The name of the tensor."""
    embedding_sha256: str
    """Of its bytes; empty for any."""


def source_of(model_id: str) -> str:
    """Where a base model lies.

    Raises:
        ModelLoadError: it is the default target, which has not been pulled.
    """
    if model_id != DEFAULT_TARGET_NAME:
        return model_id
    folder = default_target_path()
    if not is_pulled(folder):
        raise ModelLoadError(
            f"{DEFAULT_TARGET_NAME}, whose embeddings the draft reads, is not there: run `specdec "
            "models pull`, or name its folder with --base"
        )
    return str(folder)


class Distilled(NamedTuple):
    """A distilled draft before it is joined with its base."""

    folder: Path
    config: dict[str, Any]
    base: Base
    vocabulary: list[int]
    """Ascending ids of the tokens that it can propose."""

    def assemble(self, dtype: torch.dtype | Literal["auto"]) -> PreTrainedModel:
        """The model, its embeddings read from the base. "auto" is the dtype of the file.

        Raises:
            ModelLoadError: a file is missing or another one.
        """
        if self.config.get("vocab_size") != len(self.vocabulary):
            raise ModelLoadError(
                f"cannot load {str(self.folder)!r}: its config names {len(self.vocabulary)} tokens "
                f"for {self.config.get('vocab_size')} rows of the output head; distil it again"
            )
        weights = load_file(self.folder / WEIGHTS)
        if dtype == "auto":
            dtype = next(iter(weights.values())).dtype
        embedding = read_embedding(self.base).to(dtype)
        projection = weights.pop(PROJECTION, None)
        if projection is not None:
            embedding = embedding @ projection.to(dtype).T
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(**self.config), dtype=dtype
        )
        model.set_input_embeddings(nn.Embedding.from_pretrained(embedding))
        missing, unexpected = model.load_state_dict(weights, strict=False)
        missing = [name for name in missing if "embed_tokens" not in name]
        if missing or unexpected:
            raise ModelLoadError(
                f"cannot load {str(self.folder)!r}: its weights do not fit its config "
                f"({(missing + unexpected)[0]}); distil it again"
            )
        return model


def read(folder: str | Path, base: str | None = None) -> Distilled | None:
    """The distilled draft in a folder; None if the folder holds something else.

    Args:
        folder: where to look.
        base: where its base is now, if not where it was.

    Raises:
        ModelLoadError: its config is damaged.
    """
    path = Path(folder).expanduser() / "config.json"
    if not path.is_file():
        return None
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        if SECTION not in config:
            return None
        section = config.pop(SECTION)
        origin = Base(**section["base"])
        if base is not None:
            origin = origin._replace(model_id=base, revision=None)
        return Distilled(path.parent, config, origin, section["vocabulary"])
    except (ValueError, KeyError, TypeError) as error:
        raise ModelLoadError(
            f"cannot read {str(path)!r}: {error} (check that the files are complete)"
        ) from error


def read_embedding(base: Base) -> torch.Tensor:
    """[vocabulary, hidden size]: the one tensor of the base that a draft needs.

    Raises:
        ModelLoadError: the base is not there, or is another model or revision.
    """
    name = base.embedding
    try:
        with safe_open(_file_of(base, name), framework="pt") as file:
            tensor: torch.Tensor = file.get_tensor(name)
    except Exception as error:
        raise ModelLoadError(
            f"cannot read {name} of {base.model_id!r}, which the draft was distilled from: "
            f"{' '.join(str(error).split())[:300]} (its folder must hold safetensors; --base names "
            "another place)"
        ) from error
    found = tensor_sha256(tensor)
    if base.embedding_sha256 not in ("", found):
        raise ModelLoadError(
            f"{base.model_id!r} is not the model that the draft was distilled from: the SHA-256 of "
            f"{name} is {found}, expected {base.embedding_sha256}"
        )
    return tensor


def tensor_sha256(tensor: torch.Tensor) -> str:
    """The hash of a tensor's bytes."""
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().data).hexdigest()


def _file_of(base: Base, name: str) -> Path:
    """The safetensors file that holds a tensor; from a hub only that one is fetched."""
    if not _exists(base, WEIGHTS):
        index = json.loads(_path(base, _INDEX).read_text(encoding="utf-8"))
        return _path(base, index["weight_map"][name])
    return _path(base, WEIGHTS)


def _exists(base: Base, name: str) -> bool:
    options = {"_raise_exceptions_for_missing_entries": False, "revision": base.revision}
    return cached_file(source_of(base.model_id), name, **options) is not None


def _path(base: Base, name: str) -> Path:
    found = cached_file(source_of(base.model_id), name, revision=base.revision)
    assert found is not None
    return Path(found)
