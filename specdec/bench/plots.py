"""The results of a sweep as pictures. Needs matplotlib."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from specdec.bench.measures import Speculation
from specdec.bench.report import Level
from specdec.bench.sweep import PLAIN, SPECULATIVE

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS = {PLAIN: "tab:gray", SPECULATIVE: "tab:green"}
_PARTS = (
    ("draft_ms", "draft"),
    ("verify_ms", "verify"),
    ("wire_ms", "wire"),
    ("queue_ms", "queue"),
)


def missing() -> str | None:
    """What to do before plots can be made, or None."""
    if importlib.util.find_spec("matplotlib") is None:
        return "plots need matplotlib: pip install matplotlib, or pip install 'specdec[bench]'"
    return None


def draw(levels: Sequence[Level], kinds: dict[str, Speculation], folder: Path) -> list[Path]:
    """Writes PNG files into a folder, which is made if it is not there. Gives their paths."""
    # Without pyplot no window system is looked for.
    from matplotlib.figure import Figure

    folder.mkdir(parents=True, exist_ok=True)
    figures: list[tuple[Figure, Path]] = []

    def picture(name: str, title: str, y_label: str) -> Axes:
        figure = Figure(figsize=(7, 4.5), layout="constrained")
        axes = figure.subplots()
        axes.set_title(title)
        axes.set_ylabel(y_label)
        figures.append((figure, folder / f"{name}.png"))
        return axes

    axes = picture("throughput", "Throughput", "tokens/s, all clients together")
    _lines(axes, levels, {"tokens_per_second": "-"})
    axes = picture("ttft", "Time to the first token (— p50, ·· p95)", "ms")
    _lines(axes, levels, {"ttft_ms_p50": "-", "ttft_ms_p95": ":"})
    axes = picture("inter-token", "Time between tokens (— p50, ·· p95)", "ms a token")
    _lines(axes, levels, {"inter_token_ms_p50": "-", "inter_token_ms_p95": ":"})
    axes = picture("latency", "Time of a request (— p50, ·· p95)", "ms")
    _lines(axes, levels, {"latency_ms_p50": "-", "latency_ms_p95": ":"})
    speculative = [level for level in levels if level.mode == SPECULATIVE]
    if speculative:
        _bars(picture("rounds", "Where a speculative round's time goes", "ms a round"), speculative)
    if kinds:
        axes = picture("kinds", "Mean acceptance length by kind of prompt", "tokens a round")
        axes.bar(list(kinds), [found.mean_acceptance_length or 0.0 for found in kinds.values()])
        axes.set_ylim(bottom=1.0)
    for figure, path in figures:
        figure.savefig(path, dpi=120)
    return [path for _, path in figures]


def _lines(axes: Axes, levels: Sequence[Level], styles: dict[str, str]) -> None:
    for mode, colour in _COLOURS.items():
        of_mode = [level for level in levels if level.mode == mode]
        for index, (name, style) in enumerate(styles.items()):
            points = [(level.concurrency, level.medians[name]) for level in of_mode]
            known = [(x, y) for x, y in points if y is not None]
            if known:
                axes.plot(
                    [x for x, _ in known],
                    [y for _, y in known],
                    style,
                    marker="o",
                    color=colour,
                    label=mode if index == 0 else None,
                )
    clients = sorted({level.concurrency for level in levels})
    axes.set_xscale("log", base=2)
    axes.set_xticks(clients, labels=[str(count) for count in clients])
    axes.set_xlabel("clients at once")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    if axes.has_data():
        axes.legend()


def _bars(axes: Axes, levels: Sequence[Level]) -> None:
    names = [str(level.concurrency) for level in levels]
    bottom = [0.0] * len(levels)
    for key, label in _PARTS:
        heights = [level.medians[key] or 0.0 for level in levels]
        axes.bar(names, heights, bottom=bottom, label=label)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    axes.set_xlabel("clients at once")
    axes.legend()
