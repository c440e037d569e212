"""What `specdec bench --drafts` prints."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from specdec.bench.draft_scores import Acceptance, Verdict
from specdec.bench.target_log import TargetLog
from specdec.cli.bench_tables import empty_table, number, passing_bar
from specdec.cli.terminal import tell


def show(log: TargetLog | None, verdicts: Sequence[Verdict], console: Console) -> None:
    """Prints the scores of all drafts on a log."""
    if log is None or not log.outputs:
        tell(console, "Nothing was measured.")
        return
    if not console.is_terminal:
        # A pipe has no width: a table is as wide as it needs to be.
        console.width = 200
    how = f"temperature {log.header.temperature:g}" if log.header.temperature else "greedy"
    tell(
        console,
        f"Target alone, {how}: {len(log.outputs)} outputs, {log.num_tokens:,} tokens, "
        f"{number(log.step_ms, 2)} ms a token.",
    )
    scored = [verdict for verdict in verdicts if verdict.scores]
    if scored:
        _show_scores(scored, len(log.outputs), console)
        _show_kinds(scored, console)
        _show_positions(scored, console)
        _show_curves(scored, console)
    for verdict in verdicts:
        if verdict.error:
            tell(console, Text(f"{verdict.name}: {verdict.error}", "red"))


def _show_scores(verdicts: Sequence[Verdict], num_outputs: int, console: Console) -> None:
    shown = empty_table(
        *("", "draft", "K", "outputs", "rounds", "accepted", "length"),
        *("ms a proposal", "ms a token", "c", "predicted ×", "best K"),
    )
    for verdict in verdicts:
        for index, score in enumerate(verdict.scores):
            best = "-" if verdict.recommended_k is None else str(verdict.recommended_k)
            shown.add_row(
                *(verdict.name if index == 0 else "", str(score.k)),
                f"{score.outputs} of {num_outputs}",
                *(str(score.total.rounds), *_accepted(score.total)),
                *(number(score.proposal_ms, 2), number(score.token_ms, 2)),
                *(number(score.cost_ratio, 3), number(score.predicted_speedup, 2)),
                best if index == 0 else "",
            )
    console.print(shown)


def _show_kinds(verdicts: Sequence[Verdict], console: Console) -> None:
    kinds = sorted({kind for one in verdicts for score in one.scores for kind in score.kinds})
    shown = empty_table("mean acceptance length by kind", "draft", "K", *kinds)
    for verdict in verdicts:
        for index, score in enumerate(verdict.scores):
            lengths = (
                score.kinds[kind].mean_acceptance_length if kind in score.kinds else None
                for kind in kinds
            )
            name = verdict.name if index == 0 else ""
            shown.add_row(name, str(score.k), *(number(length, 2) for length in lengths))
    console.print(shown)


def _show_positions(verdicts: Sequence[Verdict], console: Console) -> None:
    most = max(verdict.scores[-1].k for verdict in verdicts)
    title = "accepted by position, of the rounds that reached it"
    shown = empty_table(title, "draft", "K", *(str(position + 1) for position in range(most)))
    for verdict in verdicts:
        score = verdict.scores[-1]
        shares = ("-" if a is None else f"{a:.0%}" for a in score.total.by_position)
        shown.add_row(verdict.name, str(score.k), *shares)
    console.print(shown)


def _show_curves(verdicts: Sequence[Verdict], console: Console) -> None:
    most = max(verdict.curve[-1].k for verdict in verdicts)
    title = "expected by K: length, predicted ×"
    shown = empty_table(title, "draft", *(str(k + 1) for k in range(most)))
    for verdict in verdicts:
        for name, values in (
            (verdict.name, [point.mean_acceptance_length for point in verdict.curve]),
            ("", [point.predicted_speedup for point in verdict.curve]),
        ):
            shown.add_row(name, *(number(value, 2) for value in values))
    console.print(shown)


def _accepted(found: Acceptance) -> tuple[str, str]:
    rate = found.acceptance_rate
    return "-" if rate is None else f"{rate:.0%}", number(found.mean_acceptance_length, 2)


class Steps:
    """Shows how the recording and the replays go on: a bar on a terminal, and a line for each."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar = passing_bar(console)
        self._task = self._bar.add_task("", total=None, visible=False)

    def __enter__(self) -> Steps:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def begin(self, description: str, total: int) -> None:
        """A step of so many parts begins."""
        self._bar.reset(self._task, description=description, total=total, visible=True)

    def advance(self) -> None:
        """A part has ended."""
        self._bar.advance(self._task)

    def end(self, line: str) -> None:
        """The step has ended, with this to be told of it."""
        self._bar.update(self._task, visible=False)
        tell(self._console, line)
