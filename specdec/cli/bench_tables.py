"""What `specdec bench` prints."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from specdec.bench import report
from specdec.bench.load import Call
from specdec.bench.sweep import SPECULATIVE, Measurement, Point
from specdec.bench.sweep import Progress as Listener
from specdec.cli.terminal import tell


def number(value: float | None, digits: int = 1) -> str:
    """For a cell: - where there is no value."""
    return "-" if value is None else f"{value:.{digits}f}"


def show(measurements: Sequence[Measurement], console: Console) -> None:
    """Prints the medians of what was measured."""
    if not measurements:
        tell(console, "Nothing was measured.")
        return
    if not console.is_terminal:
        # A pipe has no width: a table is as wide as it needs to be.
        console.width = 200
    found = report.levels(measurements)
    ratios = {speedup.concurrency: speedup.median for speedup in report.speedups(measurements)}
    table = empty_table(
        "", "clients", "mode", "requests", "failed", "tokens/s", "× plain", "cached"
    )
    for level in found:
        ratio = ratios.get(level.concurrency) if level.mode == SPECULATIVE else None
        table.add_row(
            *(str(level.concurrency), level.mode, str(level.requests), str(level.failed)),
            number(level.medians["tokens_per_second"]),
            number(ratio, 2),
            f"{level.cached_tokens} of {level.prompt_tokens}",
        )
    console.print(table)
    table = empty_table(
        *("milliseconds", "clients", "mode"),
        *("TTFT p50", "p95", "token p50", "p95", "request p50", "p95"),
    )
    for level in found:
        medians = level.medians
        table.add_row(
            *(str(level.concurrency), level.mode),
            *(number(medians[f"ttft_ms_{p}"], 0) for p in ("p50", "p95")),
            *(number(medians[f"inter_token_ms_{p}"]) for p in ("p50", "p95")),
            *(number(medians[f"latency_ms_{p}"], 0) for p in ("p50", "p95")),
        )
    console.print(table)
    table = empty_table(
        *("speculation; milliseconds a round", "clients", "mode"),
        *("accepted", "length", "fallback", "draft", "verify", "wire", "queue"),
    )
    for level in found:
        medians = level.medians
        table.add_row(
            *(str(level.concurrency), level.mode),
            *_speculation(medians["acceptance_rate"], medians["mean_acceptance_length"]),
            str(level.fallback_rounds),
            *(number(medians[f"{part}_ms"]) for part in ("draft", "verify", "wire", "queue")),
        )
    console.print(table)
    _show_kinds(measurements, console)
    for name, count in report.errors(measurements).items():
        tell(console, Text(f"{count} failed: {name}", "red"))
    reasons = {r for one in measurements for r in one.summary.speculation.fallback_reasons}
    for reason in sorted(reasons):
        tell(console, Text(f"rounds without draft: {reason}", "yellow"))


def _speculation(rate: float | None, length: float | None) -> tuple[str, str]:
    return "-" if rate is None else f"{rate:.0%}", number(length, 2)


def _show_kinds(measurements: Sequence[Measurement], console: Console) -> None:
    kinds = report.kinds(measurements)
    if not kinds:
        return
    table = empty_table("speculation by kind", "kind", "accepted", "length")
    for kind, found in kinds.items():
        table.add_row(kind, *_speculation(found.acceptance_rate, found.mean_acceptance_length))
    console.print(table)


def empty_table(title: str, *columns: str) -> Table:
    """An empty table: names to the left, numbers to the right."""
    table = Table(
        title=f"\n{title}" if title else None,
        title_justify="left",
        box=None,
        pad_edge=False,
        header_style="bold",
    )
    for name in columns:
        table.add_column(name, justify="left" if name in ("mode", "kind", "draft") else "right")
    return table


def passing_bar(console: Console) -> Progress:
    """A bar that is gone at the end; where there is no terminal it is not shown."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        disable=not console.is_terminal,
        transient=True,
    )


class Display:
    """Shows how a sweep goes on: a bar on a terminal, and a line for each measurement."""

    def __init__(self, console: Console, num_points: int) -> None:
        self._console = console
        self._num_points = num_points
        self._done = 0
        self._bar = passing_bar(console)
        self._task = self._bar.add_task("warming up", total=None)

    def __enter__(self) -> Listener:
        self._bar.start()
        return Listener(self._begin, self._call_ended, self._end)

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def _begin(self, point: Point) -> None:
        clients = f"{point.concurrency} client{'s' if point.concurrency > 1 else ''}"
        self._bar.reset(
            self._task,
            description=f"[{self._done + 1}/{self._num_points}] {clients}, {point.mode}",
            total=point.num_requests,
        )

    def _call_ended(self, call: Call) -> None:
        self._bar.advance(self._task)

    def _end(self, measurement: Measurement) -> None:
        self._done += 1
        summary = measurement.summary
        line = (
            f"{self._done}/{self._num_points}  repeat {measurement.repeat + 1}, "
            f"{measurement.concurrency} at once, {measurement.mode}: "
            f"{number(summary.tokens_per_second)} tokens/s, "
            f"first token {number(summary.ttft_ms_p50, 0)} ms"
        )
        if summary.requests < measurement.planned_requests:
            line += f", {summary.requests} of {measurement.planned_requests} requests in time"
        if summary.failed:
            line += f", {summary.failed} failed"
        tell(self._console, line)
