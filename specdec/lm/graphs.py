"""Small passes as CUDA graphs: at few rows a pass is bound by launching its kernels.

A graph replays what was recorded at fixed shapes and addresses. So the passes that recur, plain
rows, draft steps and verifications, are recorded at bucketed sizes; a pass is copied into the
smallest bucket that holds it, the rest of which is padding that stores into a page of nobody's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import structlog
import torch

from specdec.lm.batch import Batch, Group, Segment, slot
from specdec.lm.pages import PAGE_SIZE, ZERO_PAGE, pages_for
from specdec.lm.tree import Branches, branches

_log = structlog.get_logger()

Run = Callable[[Batch], torch.Tensor]
Record = Callable[[Callable[[], torch.Tensor]], tuple[torch.Tensor, Callable[[], None]]]
"""Records a function. Returns where its result lies after every replay, and what replays it."""


class Bucket(NamedTuple):
    """A size that is recorded."""

    sequences: int
    rows: int
    """Of each sequence."""
    pages: int
    """Of each sequence's context."""


BUCKETS = tuple(
    Bucket(sequences, rows, pages)
    for pages in (16, 64, 256)
    for rows, most in ((1, 32), (8, 32), (16, 16))
    for sequences in (1, 2, 4, 8, 16, 32)
    if sequences <= most
)
"""Contexts of 256, 1024 and 4096 tokens; 8 rows hold proposals of up to 7 tokens, 16 rows trees of
up to 15. With more sequences of 16 rows a pass would often be mostly padding."""
TREE_WIDTH = 32
"""Of a tree, so many tokens may be cached after the pass. It need not be fed in one."""


@cache
def _memory() -> Any:
    """Where all graphs have their intermediate results: only one of them runs at a time."""
    return torch.cuda.graph_pool_handle()


def record_cuda_graph(
    function: Callable[[], torch.Tensor],
) -> tuple[torch.Tensor, Callable[[], None]]:
    """Records on the current CUDA device."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    # Libraries allocate their workspaces at the first calls, which must not be recorded.
    with torch.cuda.stream(stream):
        for _ in range(2):
            function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=_memory()):
        result = function()
    return result, graph.replay


class _Recorded:
    """One bucket: the tensors that its graph reads, and its graph."""

    def __init__(
        self, bucket: Bucket, run: Run, record: Record, scratch_page: int, device: torch.device
    ) -> None:
        self.bucket = bucket
        self._scratch = scratch_page * PAGE_SIZE
        count = bucket.sequences * bucket.rows

        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=device)

        self._token_ids, self._positions, self._slots = zeros(count), zeros(count), zeros(count)
        self._pages = zeros(bucket.sequences, bucket.pages)
        self._slots.fill_(self._scratch)
        self._num_keys = bucket.pages * PAGE_SIZE
        self._branches: Branches | None = None
        if bucket.rows > 1:
            self._branches = Branches(
                zeros(bucket.sequences).fill_(self._num_keys),
                zeros(bucket.sequences, bucket.rows, TREE_WIDTH),
            )
        self._holds_trees = False

        def function() -> torch.Tensor:
            group = Group(
                rows=slice(0, count),
                positions=self._positions.view(bucket.sequences, bucket.rows),
                pages=self._pages,
                num_keys=self._num_keys,
                branches=self._branches,
            )
            every_row = torch.arange(count, device=device)
            return run(Batch(self._token_ids, self._positions, self._slots, [group], every_row))

        self._logits, self._replay = record(function)

    def fits(self, sequences: int, rows: int, pages: int, tree_width: int) -> bool:
        """Whether it holds so many sequences with at most so many rows each."""
        most = self.bucket
        if tree_width > (0 if self._branches is None else TREE_WIDTH):
            return False
        return sequences <= most.sequences and rows <= most.rows and pages <= most.pages

    def run(self, segments: Sequence[Segment]) -> torch.Tensor:
        """Replays with these segments. Returns their logits, copied out."""
        rows = self.bucket.rows
        token_ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        pages: list[list[int]] = []
        wanted: list[int] = []
        for segment in segments:
            missing = rows - len(segment.token_ids)
            places = range(segment.start, segment.end)
            end = len(token_ids) + len(segment.token_ids)
            wanted.extend(range(end - segment.num_logits, end))
            token_ids.extend([*segment.token_ids, *[0] * missing])
            positions.extend([*segment.positions, *[0] * missing])
            slots.extend([*(slot(segment.pages, p) for p in places), *[self._scratch] * missing])
            used = list(segment.pages[: pages_for(places.stop)])
            pages.append(used + [ZERO_PAGE] * (self.bucket.pages - len(used)))
        absent = self.bucket.sequences - len(segments)
        padding = [0] * (absent * rows)
        for static, values in (
            (self._token_ids, token_ids + padding),
            (self._positions, positions + padding),
            (self._slots, slots + [self._scratch] * (absent * rows)),
            (self._pages, pages + [[ZERO_PAGE] * self.bucket.pages] * absent),
        ):
            static.copy_(torch.tensor(values, dtype=torch.int64))
        self._set_trees(segments)
        self._replay()
        index = torch.tensor(wanted, dtype=torch.int64, device=self._logits.device)
        return self._logits.index_select(0, index)

    def _set_trees(self, segments: Sequence[Segment]) -> None:
        """Copies what the rows see of their trees: a pass without any does so only after another
        with one."""
        any_trees = any(segment.tree is not None for segment in segments)
        if self._branches is not None and (any_trees or self._holds_trees):
            shape = (self.bucket.sequences, self.bucket.rows, TREE_WIDTH)
            parts = branches([segment.span for segment in segments], shape, self._num_keys)
            for static, values in zip(self._branches, parts, strict=True):
                static.copy_(values)
            self._holds_trees = any_trees


class PassGraphs:
    """Runs the passes that fit into a recorded bucket."""

    def __init__(
        self,
        run: Run,
        *,
        scratch_page: int,
        device: torch.device,
        max_pages: int,
        record: Record = record_cuda_graph,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        """
        Args:
            run: a pass, free of anything that waits for the device; it gives the logits of all of
                the batch's `logit_rows`.
            scratch_page: where padding stores.
            device: of the tensors.
            max_pages: of all sequences together; larger buckets are of no use.
            record: what makes a function repeatable.
            progress: told how many buckets of how many are recorded.
        """
        smallest = BUCKETS[0].pages
        fitting = [b for b in BUCKETS if b.pages == smallest or b.sequences * b.pages <= max_pages]
        self._recorded: list[_Recorded] = []
        # The largest first: the others then fit into the memory that it left.
        for done, bucket in enumerate(sorted(fitting, key=_size, reverse=True), 1):
            try:
                self._recorded.append(_Recorded(bucket, run, record, scratch_page, device))
            except RuntimeError as error:
                # Such as out of memory. What cannot be recorded runs as it is.
                _log.warning("not recorded", bucket=bucket._asdict(), error=str(error)[:200])
            progress(done, len(fitting))
        self._recorded.reverse()

    def run(self, segments: Sequence[Segment]) -> torch.Tensor | None:
        """The logits of the segments, in their order; None if no bucket holds them."""
        rows = max(len(segment.token_ids) for segment in segments)
        pages = max(pages_for(segment.end) for segment in segments)
        trees = [segment for segment in segments if segment.tree is not None]
        tree_width = max((segment.span.width for segment in trees), default=0)
        for recorded in self._recorded:
            if recorded.fits(len(segments), rows, pages, tree_width):
                return recorded.run(segments)
        return None


def _size(bucket: Bucket) -> tuple[int, int]:
    """What a pass costs grows with both."""
    return bucket.sequences * bucket.rows, bucket.pages
