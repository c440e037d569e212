"""The scores of drafts as pictures. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from specdec.bench.draft_scores import Verdict

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw(verdicts: Sequence[Verdict], folder: Path) -> list[Path]:
    """Writes PNG files into a folder, which is made if it is not there. Gives their paths."""
    # Without pyplot no window system is looked for.
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, title, draw_one in (
        ("acceptance", "Acceptance by position", _acceptance),
        ("length", "Mean acceptance length (— expected, ● replayed)", _lengths),
        ("speedup", "Predicted speedup (— expected, ● replayed)", _speedups),
    ):
        figure = Figure(figsize=(7, 4.5), layout="constrained")
        axes = figure.subplots()
        axes.set_title(title)
        for index, verdict in enumerate(one for one in verdicts if one.scores):
            draw_one(axes, verdict, f"C{index}")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.3)
        if axes.has_data():
            axes.legend()
        paths.append(folder / f"{name}.png")
        figure.savefig(paths[-1], dpi=120)
    return paths


def _acceptance(axes: Axes, verdict: Verdict, colour: str) -> None:
    axes.set_xlabel("position in the proposal")
    axes.set_ylabel("share accepted of those that were reached")
    known = [
        (position, alpha)
        for position, alpha in enumerate(verdict.scores[-1].total.by_position, start=1)
        if alpha is not None
    ]
    _line(axes, known, verdict.name, colour)
    axes.set_ylim(0, 1)


def _lengths(axes: Axes, verdict: Verdict, colour: str) -> None:
    axes.set_ylabel("tokens a round")
    axes.set_xlabel("drafted tokens a round, K")
    points = [(point.k, point.mean_acceptance_length) for point in verdict.curve]
    _line(axes, points, verdict.name, colour)
    _dots(axes, [(s.k, s.total.mean_acceptance_length) for s in verdict.scores], colour)


def _speedups(axes: Axes, verdict: Verdict, colour: str) -> None:
    axes.set_ylabel("× the target alone")
    axes.set_xlabel("drafted tokens a round, K")
    points = [(p.k, p.predicted_speedup) for p in verdict.curve]
    _line(axes, points, verdict.name, colour)
    _dots(axes, [(s.k, s.predicted_speedup) for s in verdict.scores], colour)


def _line(axes: Axes, points: Sequence[tuple[int, float | None]], label: str, colour: str) -> None:
    known = [(x, y) for x, y in points if y is not None]
    axes.plot([x for x, _ in known], [y for _, y in known], "-", color=colour, label=label)


def _dots(axes: Axes, points: Sequence[tuple[int, float | None]], colour: str) -> None:
    known = [(x, y) for x, y in points if y is not None]
    axes.plot([x for x, _ in known], [y for _, y in known], "o", color=colour)
