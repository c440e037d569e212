"""One step's rows of many sequences, packed for a single forward pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from specdec.lm.pages import PAGE_SIZE, ZERO_PAGE, pages_for
from specdec.lm.tree import Branches, Span, Tree, branches

_GATHERED_ON_CPU = 8192
"""Tokens. The keys and values that attention gathers at a time should stay in a CPU's cache."""
KEY_SPLIT = 512
"""Deterministic attention reads keys in blocks of so many, whatever the length."""


class Segment(NamedTuple):
    """Adjacent rows of one sequence."""

    token_ids: Sequence[int]
    """The tokens that are fed, at least one."""
    start: int
    """The place of the first: how many tokens of the sequence are cached already."""
    pages: Sequence[int]
    """Of the sequence, with room for these tokens."""
    num_logits: int
    """For how many of the last rows logits are wanted."""
    tree: Tree | None = None
    """Of the sequence; None if its tokens up to the last of these rows are a chain."""

    @property
    def end(self) -> int:
        """How many tokens of the sequence are cached afterwards."""
        return self.start + len(self.token_ids)

    @property
    def positions(self) -> Sequence[int]:
        """Of each row: how many tokens of the sequence it follows."""
        if self.tree is None:
            return range(self.start, self.end)
        return self.tree.positions(self.start, self.end)

    @property
    def span(self) -> Span:
        """Which of the sequence's tokens these are."""
        return Span(self.start, self.end, self.tree)


@dataclass
class Group:
    """Sequences whose attention is one call: as many rows each, and contexts of similar length."""

    rows: slice
    """Where its rows lie among the packed rows: B sequences with n rows each."""
    positions: torch.Tensor
    """int64 [B, n]: the position of each row in its sequence."""
    pages: torch.Tensor
    """int64 [B or 1, P]: 1 if all rows are of one sequence."""
    num_keys: int
    """L: how many keys are read, at most P pages."""
    first_page: int | None = None
    """Set if there is one list of pages and they lie side by side: no copy is needed then."""
    sees_all: bool = False
    """Whether there is one row, and all L keys are its past."""
    branches: Branches | None = None
    """Set if a sequence has a tree."""
    keys_of_rows: list[int] | None = None
    """Deterministic: how many keys each row reads, by its own position alone."""
    _masks: dict[tuple[int | None, int, torch.dtype], torch.Tensor] = field(default_factory=dict)

    def gather(self, layer: torch.Tensor) -> torch.Tensor:
        """The group's part of one layer's pages [N, PAGE_SIZE, heads, D] as [B, L, heads, D]."""
        if self.first_page is not None:
            found = layer[self.first_page : self.first_page + self.pages.shape[1]]
        else:
            found = layer.index_select(0, self.pages.flatten())
        found = found.reshape(len(self.pages), -1, *layer.shape[2:])
        return found[:, : self.num_keys].expand(len(self.positions), -1, -1, -1)

    def mask(self, window: int | None, repeats: int, dtype: torch.dtype) -> torch.Tensor | None:
        """[B, 1, repeats · n, L]: 0 where a row may look, −inf elsewhere. None if it may always.

        Args:
            window: how many of the last positions a row sees; None for all.
            repeats: how often the rows follow each other: the query heads of one key head.
            dtype: of the queries.
        """
        if self.sees_all and (window is None or self.num_keys <= window):
            return None
        found = self._masks.get((window, repeats, dtype))
        if found is None:
            width = 0 if self.branches is None else self.branches.distances.shape[-1]
            keys = torch.arange(self.num_keys + width, device=self.positions.device)
            rows = self.positions.unsqueeze(-1)
            hidden = keys > rows
            if window is not None:
                hidden |= keys <= rows - window
            if self.branches is not None:
                hidden = self.branches.hide(hidden, window)
            zeros = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
            found = zeros.masked_fill_(hidden, -torch.inf).unsqueeze(1).repeat(1, 1, repeats, 1)
            self._masks[window, repeats, dtype] = found
        return found


@dataclass
class Batch:
    """The packed rows of some sequences."""

    token_ids: torch.Tensor
    """int64 [T]."""
    positions: torch.Tensor
    """int64 [T], of each row in its sequence."""
    slots: torch.Tensor
    """int64 [T], or less if the last rows are padding that stores nothing: where the keys and
    values of each row go, page · PAGE_SIZE + offset."""
    groups: list[Group]
    """They cover all rows but the padding."""
    logit_rows: torch.Tensor
    """int64 [M], the rows whose logits are wanted."""


def pack(
    segments: Sequence[Segment],
    device: torch.device,
    *,
    num_rows: int | None = None,
    deterministic: bool = False,
) -> Batch:
    """Packs segments; the logits come in their order.

    Args:
        segments: at least one.
        device: of the tensors.
        num_rows: pads with rows that nobody reads, up to so many.
        deterministic: whether attention treats each row by itself. There may be no trees then.

    Raises:
        NotImplementedError: there is one.
    """
    if deterministic and any(segment.tree is not None for segment in segments):
        raise NotImplementedError("trees of drafted tokens in deterministic mode")
    keyed: dict[tuple[int, ...], list[int]] = {}
    for index, segment in enumerate(segments):
        keyed.setdefault(_group_key(index, segment, deterministic), []).append(index)
    grouped = list(keyed.values())
    if device.type == "cpu":
        grouped = [part for members in grouped for part in _parted(members, segments)]
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    first_row = [0] * len(segments)
    parts: list[tuple[slice, list[Segment]]] = []
    for members in grouped:
        begin = len(token_ids)
        for index in members:
            segment = segments[index]
            first_row[index] = len(token_ids)
            token_ids.extend(segment.token_ids)
            places = range(segment.start, segment.end)
            positions.extend(places if segment.tree is None else segment.positions)
            slots.extend(slot(segment.pages, place) for place in places)
        parts.append((slice(begin, len(token_ids)), [segments[i] for i in members]))
    logit_rows: list[int] = []
    for row, segment in zip(first_row, segments, strict=True):
        end = row + len(segment.token_ids)
        logit_rows.extend(range(end - segment.num_logits, end))
    padding = [0] * max(0, (num_rows or 0) - len(token_ids))

    def tensor(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    all_positions = tensor(positions + padding)
    return Batch(
        token_ids=tensor(token_ids + padding),
        positions=all_positions,
        slots=tensor(slots),
        groups=[
            _group(rows, all_positions[rows], members, deterministic=deterministic)
            for rows, members in parts
        ],
        logit_rows=tensor(logit_rows),
    )


def slot(pages: Sequence[int], place: int) -> int:
    """Where the keys and values of the token at this place of a sequence go."""
    return pages[place // PAGE_SIZE] * PAGE_SIZE + place % PAGE_SIZE


def _group(
    rows: slice, positions: torch.Tensor, members: list[Segment], *, deterministic: bool
) -> Group:
    ends = [member.end for member in members]
    longest = max(ends)
    num_keys = longest if len(members) == 1 else pages_for(longest) * PAGE_SIZE
    keys_of_rows = None
    if deterministic:
        first = members[0].start + 1
        keys_of_rows = [-(-end // KEY_SPLIT) * KEY_SPLIT for end in range(first, longest + 1)]
        num_keys = keys_of_rows[-1]
    count = pages_for(num_keys)
    lists = []
    for member, end in zip(members, ends, strict=True):
        used = list(member.pages[: pages_for(end)])
        lists.append(used + [ZERO_PAGE] * (count - len(used)))
    page = lists[0][0]
    adjacent = len(lists) == 1 and lists[0] == list(range(page, page + count))
    rows_each = len(members[0].token_ids)
    found = None
    if any(member.tree is not None for member in members):
        spans = [member.span for member in members]
        width = max(span.width for span in spans)
        parts = branches(spans, (len(spans), rows_each, width), num_keys)
        found = Branches(*(part.to(positions.device) for part in parts))
    return Group(
        rows=rows,
        positions=positions.view(-1, 1 if deterministic else rows_each),
        pages=torch.tensor(lists, dtype=torch.int64, device=positions.device),
        num_keys=num_keys,
        first_page=page if adjacent else None,
        sees_all=len(members) == 1 and rows_each == 1 and not deterministic and found is None,
        keys_of_rows=keys_of_rows,
        branches=found,
    )


def _parted(members: list[int], segments: Sequence[Segment]) -> Iterator[list[int]]:
    """Splits a group by how much is gathered for it."""
    longest = max(segments[i].end for i in members)
    at_once = max(1, _GATHERED_ON_CPU // longest)
    for begin in range(0, len(members), at_once):
        yield members[begin : begin + at_once]


def _group_key(index: int, segment: Segment, deterministic: bool) -> tuple[int, ...]:
    """Segments of one key are one group."""
    if deterministic:
        return (index,)
    # A short context in one call with a long one would be padded to its length; by powers of two
    # it at most doubles.
    pages = pages_for(segment.end)
    return (len(segment.token_ids), pages.bit_length())
