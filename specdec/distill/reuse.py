"""The texts of another distillation, to learn from them as well."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from specdec.distill.recipe import Recipe, WrittenTexts
from specdec.distill.texts import num_written


class Reused(NamedTuple):
    """What another distillation wrote."""

    texts: WrittenTexts
    shards: list[Path]


def reuse(folder: Path, target: str, num_top: int) -> Reused:
    """Finds the texts of a distillation, finished or not.

    Args:
        folder: its `--out`.
        target: who has to have written them.
        num_top: how many of the likeliest tokens they have to hold at each position.

    Raises:
        ValueError: there are none, or others are needed.
    """
    shards = sorted((folder / "work" / "texts").glob("*.safetensors"))
    path = folder / "work" / "recipe.json"
    if not shards or not path.exists():
        raise ValueError(f"{folder} holds no texts of a distillation")
    try:
        recipe = Recipe.model_validate_json(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} cannot be read") from error
    if recipe.target != target:
        raise ValueError(f"the texts of {folder} were written by {recipe.target}, not by {target}")
    if recipe.writing.num_top != num_top:
        raise ValueError(
            f"the texts of {folder} hold the {recipe.writing.num_top} likeliest tokens of each "
            f"position, not {num_top}"
        )
    written = WrittenTexts(
        seed=recipe.seed,
        writing=recipe.writing,
        tokens=sum(map(num_written, shards)),
        sha256=_digest(shards),
    )
    return Reused(written, shards)


def _digest(shards: Sequence[Path]) -> str:
    digest = hashlib.sha256()
    for shard in shards:
        with shard.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()
