"""How a draft is made: everything that the result depends on, besides the target."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from specdec.lm.settings import DType


class WritingRecipe(BaseModel):
    """What the target writes."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    dtype: DType = "auto"
    """Of the target's weights."""
    texts_per_shard: int = Field(512, ge=1)
    slots: int = Field(64, ge=1)
    """Texts that are written side by side."""
    max_length: int = Field(320, ge=8)
    """Most tokens of a text."""
    max_prompt: int = Field(128, ge=1)
    """Most tokens of a user's turn."""
    num_top: int = Field(32, ge=1)
    """How many of the likeliest tokens are kept at each position."""
    corpus_sha256: str | None = None
    """Of the user's own prompts."""
    corpus_share: float = Field(0.5, ge=0, le=1)
    """Of the texts: those that answer the user's own prompts, if there are any."""


class WrittenTexts(BaseModel):
    """Texts that another distillation wrote."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    seed: int
    writing: WritingRecipe
    tokens: int
    """That the target wrote."""
    sha256: str
    """Of the shards."""


class TrainingRecipe(BaseModel):
    """How the student learns."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    layers: int | tuple[int, ...]
    """The target's layers that the student begins with, or how many, spread over all."""
    hidden_size: int | None = None
    """The target's own if None."""
    draft_vocab: int = Field(8192, ge=2)
    """Tokens that the student can propose, at most."""
    tokens: int = Field(2_000_000, ge=0)
    """Tokens that the target writes for the student to learn from."""
    texts: tuple[WrittenTexts, ...] = ()
    """What it learns from besides."""
    epochs: int = Field(4, ge=1)
    tokens_per_step: int = Field(4096, ge=1)
    learning_rate: float = Field(0.03, gt=0)
    """Of the matrices of the layers, by Muon."""
    head_learning_rate: float = Field(1e-3, gt=0)
    """Of everything else, by AdamW."""
    rollout_tokens: int = Field(200_000, ge=0)
    """Tokens that are written with the student's proposals, for the on-policy phase."""
    num_draft_tokens: int = Field(5, ge=1)
    """Proposed at a time in that phase."""
    rollout_rate: float = Field(0.2, gt=0)
    """Learning rates of that phase, as a part of those before."""


class Recipe(BaseModel):
    """How a draft is made from a target."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    target: str
    license: str
    """Of the draft."""
    seed: int = 0
    writing: WritingRecipe
    training: TrainingRecipe


def differences(path: Path, recipe: Recipe) -> list[str]:
    """In which settings a recipe differs from the one in a file, if there is one.

    What was begun by one recipe cannot be finished by another.
    """
    if not path.exists():
        return []
    try:
        held, wanted = _flat(Recipe.model_validate_json(path.read_bytes())), _flat(recipe)
    except ValueError:
        return [f"{path.name} cannot be read"]
    return [
        f"{key} was {held[key]}, is {wanted[key]}" for key in wanted if held[key] != wanted[key]
    ]


def keep(path: Path, recipe: Recipe) -> None:
    """Writes a recipe to a file, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(recipe.model_dump_json(indent=1) + "\n", encoding="utf-8")
    partial.replace(path)


def _flat(recipe: Recipe) -> dict[str, Any]:
    values = recipe.model_dump(mode="json")
    nested = {**values.pop("writing"), **values.pop("training")}
    return {**values, **nested}
