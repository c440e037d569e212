"""Texts cut into the batches of an epoch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from specdec.distill.texts import Text

_POOL = 256
"""Texts that are sorted by length together, so that little of a batch is padding."""


class Batch(NamedTuple):
    """B texts, padded at the end, and what the teacher thought where it wrote them."""

    token_ids: torch.Tensor
    """int64 [B, T]."""
    rows: torch.Tensor
    """int64 [N]: where in B · T the states lie that predict the N written tokens."""
    columns: torch.Tensor
    """int64 [N, top]: the rows of the student's head for the teacher's likeliest tokens."""
    probabilities: torch.Tensor
    """float32 [N, top]; 0 where the head has no row."""
    weights: torch.Tensor
    """float32 [N]."""


def columns_of(vocabulary: torch.Tensor, size: int) -> torch.Tensor:
    """int64 [size]: for each token its row in the head, −1 where it has none."""
    columns = torch.full((size,), -1, dtype=torch.int64)
    columns[vocabulary] = torch.arange(len(vocabulary))
    return columns


def epoch(texts: Sequence[Text], tokens_per_step: int, seed: int) -> Iterator[list[Text]]:
    """The texts in an order of their own, cut into batches of at most so many padded tokens."""
    for batch in cut([len(text.token_ids) for text in texts], tokens_per_step, seed):
        yield [texts[i] for i in batch]


def cut(lengths: Sequence[int], tokens_per_step: int, seed: int) -> list[list[int]]:
    """The batches of `epoch`, as indices of the texts; `lengths` are theirs in tokens."""
    # The last token of a text has no follower, and is not fed.
    fed = [length - 1 for length in lengths]
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(fed), generator=generator).tolist()
    batches: list[list[int]] = []
    for begin in range(0, len(order), _POOL):
        batch: list[int] = []
        for index in sorted(order[begin : begin + _POOL], key=fed.__getitem__):
            if batch and (len(batch) + 1) * fed[index] > tokens_per_step:
                batches.append(batch)
                batch = []
            batch.append(index)
        batches.append(batch)
    return [batches[i] for i in torch.randperm(len(batches), generator=generator).tolist()]


def collate(texts: Sequence[Text], columns: torch.Tensor) -> Batch:
    """Puts texts side by side; `columns` is of `columns_of`."""
    width = max(len(text.token_ids) for text in texts) - 1
    token_ids = torch.zeros(len(texts), width, dtype=torch.int64)
    rows = []
    for index, text in enumerate(texts):
        token_ids[index, : len(text.token_ids) - 1] = text.token_ids[:-1]
        rows.append(text.written.nonzero()[:, 0] - 1 + index * width)
    found = columns[torch.cat([text.top_ids for text in texts]).long()]
    probabilities = torch.cat([text.top_logprobs for text in texts]).float().exp()
    return Batch(
        token_ids,
        torch.cat(rows),
        found.clamp_min(0),
        probabilities.masked_fill(found < 0, 0.0),
        torch.cat([text.weights for text in texts]),
    )
