"""`specdec distill`: a draft model made from a target."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast, get_args

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as RichProgress
from rich.table import Table

from specdec.cli.terminal import fail, stderr, stdout, tell
from specdec.distill.progress import Progress, Report
from specdec.distill.recipe import Recipe, TrainingRecipe, WritingRecipe
from specdec.lm.settings import DType
from specdec.models.cache import DEFAULT_TARGET_NAME, default_target_path, is_pulled

if TYPE_CHECKING:
    from specdec.distill.report import DraftReport

_LINE_SECONDS = 15.0


def distill(
    out: Annotated[Path, typer.Option(help="The draft's folder; texts are kept in OUT/work.")],
    target: Annotated[
        str | None,
        typer.Option(help="Hub id or folder of the target; the embedded default if left out."),
    ] = None,
    tokens: Annotated[
        int, typer.Option(min=0, help="Tokens that the target writes to learn from.")
    ] = 2_000_000,
    texts: Annotated[
        list[Path] | None,
        typer.Option(
            help="The --out of another distillation, whose texts are learned as well. May be "
            "given several times."
        ),
    ] = None,
    epochs: Annotated[int, typer.Option(min=1, help="How often they are learned.")] = 4,
    rollout_tokens: Annotated[
        int, typer.Option(min=0, help="Tokens of the on-policy phase; 0 leaves it out.")
    ] = 200_000,
    layers: Annotated[
        str,
        typer.Option(help="Number of layers, or the target's layers to begin with, as 0,15,29."),
    ] = "2",
    hidden: Annotated[
        int | None, typer.Option(min=8, help="Hidden size, if not the target's own.")
    ] = None,
    draft_vocab: Annotated[
        int, typer.Option(min=2, help="How many tokens, the commonest, the draft can propose.")
    ] = 8192,
    corpus: Annotated[
        Path | None,
        typer.Option(
            help="What your users ask: a text file, a prompt a line, or JSONL with the field "
            "`prompt`. Half of the texts then answer these."
        ),
    ] = None,
    corpus_share: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="The share of texts that do.")
    ] = 0.5,
    max_length: Annotated[int, typer.Option(min=8, help="Most tokens of a text.")] = 320,
    max_prompt: Annotated[int, typer.Option(min=1, help="Most tokens of a user's turn.")] = 128,
    batch: Annotated[int, typer.Option(min=1, help="Texts that are written at a time.")] = 64,
    tokens_per_step: Annotated[
        int, typer.Option(min=1, help="Tokens of a training step, at most.")
    ] = 4096,
    learning_rate: Annotated[
        float, typer.Option(min=1e-6, help="Of the layers' matrices, by Muon.")
    ] = 0.03,
    seed: Annotated[int, typer.Option(min=0, help="Of texts and training.")] = 0,
    device: Annotated[str, typer.Option(help="As of `specdec draft`.")] = "auto",
    dtype: Annotated[str, typer.Option(help="Of the target, as of `specdec verifier`.")] = "auto",
    num_threads: Annotated[
        int | None, typer.Option(min=1, help="Cores to use; torch decides if left out.")
    ] = None,
    compile_model: Annotated[
        bool | None,
        typer.Option("--compile/--no-compile", help="Compile the training. [on CUDA only]"),
    ] = None,
    license_name: Annotated[
        str, typer.Option("--license", help="Of the draft; mostly that of the target.")
    ] = "other",
) -> None:
    """Make a draft model for a target.

    It learns from what the target itself writes. The same command goes on where it was stopped. The
    report goes to standard output, progress to standard error.
    """
    source = target or DEFAULT_TARGET_NAME
    if target is not None and Path(target).is_dir():
        # The draft is to find it from anywhere.
        source = str(Path(target).absolute())
    if target is None and not is_pulled(default_target_path()):
        fail("the default model is not there: run `specdec models pull`, or name a --target")
    prompts = [] if corpus is None else _prompts(corpus)
    digest = hashlib.sha256("\0".join(prompts).encode()).hexdigest() if prompts else None
    recipe = Recipe(
        target=source,
        license=license_name,
        seed=seed,
        writing=WritingRecipe(
            dtype=_dtype(dtype),
            texts_per_shard=8 * batch,
            slots=batch,
            max_length=max_length,
            max_prompt=max_prompt,
            corpus_sha256=digest,
            corpus_share=corpus_share,
        ),
        training=TrainingRecipe(
            layers=_layers(layers),
            hidden_size=hidden,
            draft_vocab=draft_vocab,
            tokens=tokens,
            epochs=epochs,
            tokens_per_step=tokens_per_step,
            learning_rate=learning_rate,
            rollout_tokens=rollout_tokens,
        ),
    )
    console = stderr()
    try:
        result = _distil(
            recipe, out, device, num_threads, compile_model, prompts, texts or [], console
        )
    except KeyboardInterrupt:
        tell(console, f"stopped; the same command goes on from what is in {out}")
        raise typer.Exit(130) from None
    _show(result, stdout())
    place = target or default_target_path()
    tell(console, f"the draft is in {out}: use it by `specdec up --target {place} --draft {out}`")


def _distil(
    recipe: Recipe,
    out: Path,
    device: str,
    num_threads: int | None,
    compile_model: bool | None,
    prompts: list[str],
    texts_of: list[Path],
    console: Console,
) -> DraftReport:
    tell(console, "Loading torch.")
    import torch

    from specdec.distill.distillation import Distillation, DistillError
    from specdec.lm.architecture import ModelLoadError

    if num_threads is not None:
        torch.set_num_threads(num_threads)
    try:
        with _progress(console) as report:
            distillation = Distillation(
                recipe,
                out,
                device=device,
                compile_model=compile_model,
                corpus=prompts,
                texts_of=texts_of,
                report=report,
            )
            return distillation.run()
    except (DistillError, ModelLoadError) as error:
        fail(str(error))


def _layers(text: str) -> int | tuple[int, ...]:
    try:
        found = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise typer.BadParameter(
            "give a number, or indices as 0,15,29", param_hint="--layers"
        ) from None
    if min(found) < 0 or found == (0,) or len(set(found)) != len(found):
        raise typer.BadParameter("give a number, or indices as 0,15,29", param_hint="--layers")
    return found[0] if len(found) == 1 else found


def _dtype(name: str) -> DType:
    if name not in get_args(DType):
        allowed = ", ".join(get_args(DType))
        raise typer.BadParameter(f"must be one of {allowed}", param_hint="--dtype")
    return cast("DType", name)


def _prompts(path: Path) -> list[str]:
    """What users say, of a file of either form."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        fail(f"cannot read --corpus {path}: {error}")
    lines = [(i, line) for i, line in enumerate(text.split("\n"), 1) if line.strip()]
    if path.suffix not in (".jsonl", ".ndjson"):
        found = [line.strip() for _, line in lines]
    else:
        found = []
        for number, line in lines:
            try:
                found.append(str(json.loads(line)["prompt"]))
            except (ValueError, KeyError, TypeError):
                fail(f"--corpus {path}, line {number}: give JSON objects with the field `prompt`")
    if not found:
        fail(f"--corpus {path} holds no prompt")
    return found


@contextmanager
def _progress(console: Console) -> Iterator[Report]:
    """Shows stages as bars on a terminal, as lines now and then elsewhere."""
    if not console.is_terminal:
        yield _Lines(console)
        return
    columns = (
        SpinnerColumn(finished_text="[green]✓"),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with RichProgress(*columns, console=console) as bars:
        tasks: dict[str, TaskID] = {}

        def report(progress: Progress) -> None:
            if progress.stage not in tasks:
                tasks[progress.stage] = bars.add_task(progress.stage, total=None, note="")
            bars.update(
                tasks[progress.stage],
                completed=progress.done,
                total=progress.total,
                note=progress.note,
            )

        yield report


class _Lines:
    """A line where a stage begins and ends, and every few seconds between."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._stage, self._begun, self._first, self._told = "", 0.0, 0, 0.0
        self._ended = False

    def __call__(self, progress: Progress) -> None:
        now = time.monotonic()
        if progress.stage != self._stage:
            self._stage, self._begun, self._first = progress.stage, now, progress.done
            self._told, self._ended = -math.inf, False
        ends = progress.done >= progress.total
        if self._ended or (not ends and now - self._told < _LINE_SECONDS):
            return
        self._told, self._ended = now, ends
        line = f"{progress.stage}: {progress.done} of {progress.total}"
        gained = progress.done - self._first
        if gained > 0 and progress.done < progress.total:
            left = (now - self._begun) / gained * (progress.total - progress.done)
            line += f", {timedelta(seconds=round(left))} left"
        tell(self._console, line + (f", {progress.note}" if progress.note else ""))


def _show(report: DraftReport, console: Console) -> None:
    table = Table(title="What the target accepts of the draft (held-out texts, rule REJECTION)")
    table.add_column("K", justify="right")
    for each in report.acceptance:
        for name in ("α", "τ", "speedup"):
            table.add_column(f"{name}\nT = {each.temperature:g}", justify="right")
    for k in range(len(report.acceptance[0].alpha_by_position)):
        cells = [str(k + 1)]
        for each in report.acceptance:
            values = (each.alpha_by_position, each.mean_acceptance_length, report.speedups(each))
            cells += [f"{column[k]:.3f}" for column in values]
        table.add_row(*cells)
    console.print(table)
    console.print(
        f"α: of position K. A step of the draft takes {report.draft_step_ms:.2f} ms, of the target "
        f"{report.target_step_ms:.2f} ms: c = {report.cost_ratio:.3f}."
    )
    for each in report.acceptance:
        k = report.recommended_k(each)
        advice = f"K = {k}" if k else "no speculation"
        console.print(f"Recommended at temperature {each.temperature:g}: {advice}.")
