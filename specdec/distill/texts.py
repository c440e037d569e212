"""Texts that the target wrote, with its thoughts, in shards on disk."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file


class Kind(IntEnum):
    """Where a token comes from."""

    GIVEN = 0
    """The template, or a prompt of the corpus."""
    PROMPT = 1
    """The target, as the user."""
    ANSWER = 2
    """The target, as the assistant."""


class Text(NamedTuple):
    """One text of N tokens, M of them written by the target."""

    number: int
    token_ids: torch.Tensor
    """int32 [N]."""
    kinds: torch.Tensor
    """uint8 [N], `Kind`."""
    written: torch.Tensor
    """bool [N]: whether the target wrote the token."""
    top_ids: torch.Tensor
    """int32 [M, top]: the likeliest tokens where each written token stands."""
    top_logprobs: torch.Tensor
    """float16 [M, top]: their log-probabilities at temperature 1, the largest first."""
    logprobs: torch.Tensor
    """float32 [M]: the log-probability of each written token at temperature 1."""
    weights: torch.Tensor
    """float32 [M]: how much each counts in training."""


def save(texts: Sequence[Text], path: Path) -> None:
    """Writes a shard, whole or not at all."""
    partial = path.with_suffix(".partial")
    save_file(
        {
            "numbers": torch.tensor([text.number for text in texts]),
            "lengths": torch.tensor([len(text.token_ids) for text in texts]),
            "token_ids": torch.cat([text.token_ids for text in texts]),
            "kinds": torch.cat([text.kinds for text in texts]),
            "top_ids": torch.cat([text.top_ids for text in texts]),
            "top_logprobs": torch.cat([text.top_logprobs for text in texts]),
            "logprobs": torch.cat([text.logprobs for text in texts]),
            "weights": torch.cat([text.weights for text in texts]),
        },
        partial,
    )
    partial.replace(path)


def lengths(path: Path) -> list[int]:
    """The tokens of each text of a shard, of which nothing else is read."""
    with safe_open(path, framework="pt") as held:
        found: list[int] = held.get_tensor("lengths").tolist()
    return found


def num_written(path: Path) -> int:
    """How many tokens of a shard the target wrote. Only the file's header is read."""
    with safe_open(path, framework="pt") as held:
        return int(held.get_slice("logprobs").get_shape()[0])


def load(path: Path) -> list[Text]:
    """Reads a shard."""
    held = load_file(path)
    lengths = held["lengths"].tolist()
    token_ids, kinds = held["token_ids"].split(lengths), held["kinds"].split(lengths)
    written = [each != Kind.GIVEN for each in kinds]
    counts = [int(each.sum()) for each in written]
    return [
        Text(*parts)
        for parts in zip(
            held["numbers"].tolist(),
            token_ids,
            kinds,
            written,
            held["top_ids"].split(counts),
            held["top_logprobs"].split(counts),
            held["logprobs"].split(counts),
            held["weights"].split(counts),
            strict=True,
        )
    ]
