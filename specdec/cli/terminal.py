"""How the commands talk to people."""

from __future__ import annotations

import contextlib
from typing import NoReturn

import typer
from rich.console import Console
from rich.segment import Segment, Segments
from rich.style import Style
from rich.text import Text

# The control characters but tab and newline, as the pictures that Unicode has of them.
_HARMLESS = {code: 0x2400 + code for code in range(0x20) if chr(code) not in "\t\n"}
_HARMLESS |= {0x7F: 0x2421} | dict.fromkeys(range(0x80, 0xA0), 0xFFFD)


def write(console: Console, text: str, style: str = "") -> None:
    """Writes text as it is, neither wrapped nor read as markup.

    On a terminal control characters are shown and not sent: what a model says must not move the
    cursor or set the title. Elsewhere they stay, so that a pipe gets the very text.
    """
    if console.is_terminal:
        text = text.translate(_HARMLESS)
    console.print(Segments([Segment(text, Style.parse(style))]), end="", soft_wrap=True)


def tell(console: Console, *parts: str | Text) -> None:
    """Prints a line about running services, which outlive whoever reads about them.

    If the terminal or the pipe is gone nothing is printed.
    """
    # rich exits at a broken pipe, and is quiet from then on.
    with contextlib.suppress(OSError, SystemExit):
        console.print(*parts, markup=False)


def stdout() -> Console:
    """The console for results."""
    return _console(stderr=False)


def stderr() -> Console:
    """The console for what is not the result: errors and statistics."""
    return _console(stderr=True)


def _console(*, stderr: bool) -> Console:
    console = Console(stderr=stderr, highlight=False)
    # Lines break between words in a window, and nowhere in a pipe or a log.
    console.soft_wrap = not console.is_terminal
    return console


def fail(message: str) -> NoReturn:
    """Ends the command with status 1, after one line that says why."""
    line = " ".join(message.translate(_HARMLESS).split())
    stderr().print(Text(f"error: {line}", "red"))
    raise typer.Exit(1)
