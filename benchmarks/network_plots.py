"""The network sweep as pictures. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.network_cells import Cell, Prediction, Sample

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw(
    measured: Mapping[Cell, Sample], predicted: Mapping[Cell, Prediction], folder: Path
) -> list[Path]:
    """Writes PNG files into a folder, two for each temperature and rule. Gives their paths."""
    # Without pyplot no window system is looked for.
    from matplotlib.figure import Figure

    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    settings = sorted({(c.temperature, c.rule, c.draft_topk) for c in measured if c.k})
    for temperature, rule, topk in settings:
        mine = [
            cell
            for cell in measured
            if cell.temperature == temperature
            and (not cell.k or (cell.rule, cell.draft_topk) == (rule, topk))
        ]
        aheads = sorted({cell.run_ahead for cell in mine if cell.k})
        name = f"T{temperature:g}-{rule}" + (f"-topk{topk}" if topk > 1 else "")
        title = f"temperature {temperature:g}, {rule}"
        figure = Figure(figsize=(6.5 * len(aheads), 4.5), layout="constrained")
        every = figure.subplots(1, len(aheads), sharey=True, squeeze=False)[0]
        for axes, run_ahead in zip(every, aheads, strict=True):
            axes.set_title(f"{title}, run-ahead {run_ahead} (● measured, - - closed form)")
            axes.set_ylabel("tokens a second")
            _rates(axes, [c for c in mine if not c.k or c.run_ahead == run_ahead], measured)
            _closed(axes, [c for c in mine if not c.k or c.run_ahead == run_ahead], predicted)
            _finish(axes)
        paths.append(folder / f"rtt-{name}.png")
        figure.savefig(paths[-1], dpi=120)
        if 0 in aheads and len(aheads) > 1:
            figure = Figure(figsize=(7, 4.5), layout="constrained")
            axes = figure.subplots()
            axes.set_title(f"{title}: run-ahead {aheads[-1]} on ÷ off (- - closed form)")
            axes.set_ylabel("tokens a second, on ÷ off")
            rates = {cell: one.tokens_per_second for cell, one in measured.items()}
            said = {cell: one.from_tau for cell, one in predicted.items()}
            _gains(axes, [c for c in mine if c.run_ahead == aheads[-1]], rates, "o-")
            _gains(axes, [c for c in mine if c.run_ahead == aheads[-1]], said, "--")
            _finish(axes)
            paths.append(folder / f"run-ahead-{name}.png")
            figure.savefig(paths[-1], dpi=120)
    return paths


def _finish(axes: Axes) -> None:
    axes.set_xlabel("round trip of each link, ms")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()


def _by_k(cells: list[Cell]) -> list[tuple[int, list[Cell]]]:
    """Cells of each K, by RTT."""
    ks = sorted({cell.k for cell in cells})
    return [(k, sorted((c for c in cells if c.k == k), key=lambda c: c.rtt)) for k in ks]


def _rates(axes: Axes, cells: list[Cell], measured: Mapping[Cell, Sample]) -> None:
    for index, (k, mine) in enumerate(_by_k(cells)):
        rates = [measured[cell].tokens_per_second for cell in mine]
        axes.plot([cell.rtt for cell in mine], rates, "o-", color=f"C{index}", label=_name(k))


def _closed(axes: Axes, cells: list[Cell], predicted: Mapping[Cell, Prediction]) -> None:
    for index, (_, mine) in enumerate(_by_k(cells)):
        rates = [predicted[cell].from_tau for cell in mine]
        axes.plot([cell.rtt for cell in mine], rates, "--", color=f"C{index}")


def _gains(axes: Axes, cells: list[Cell], rates: Mapping[Cell, float], style: str) -> None:
    for index, (k, mine) in enumerate(_by_k([cell for cell in cells if cell.k])):
        off = [rates[Cell(**{**vars(cell), "run_ahead": 0})] for cell in mine]
        gains = [rates[cell] / base for cell, base in zip(mine, off, strict=True)]
        label = _name(k) if "o" in style else None
        axes.plot([cell.rtt for cell in mine], gains, style, color=f"C{index}", label=label)


def _name(k: int) -> str:
    return f"K = {k}" if k else "plain"
