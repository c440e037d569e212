"""A Python child process whose output stays off the terminal."""

import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

_POLL_SECONDS = 0.1


class ModelPullError(Exception):
    """A model could not be pulled; the text is one line that says why and what to do."""


def run_python(arguments: Sequence[str], work: Path, poll: Callable[[str], None]) -> None:
    """Run this interpreter with `arguments` until it ends, and end it if anything interrupts.

    Args:
        arguments: What follows the interpreter on the command line.
        work: An existing folder for what the child prints.
        poll: Called every 100 ms with the last line that the child printed, "" before the first.

    Raises:
        ModelPullError: The child failed; the text is its last word on why.
    """
    output, errors = work / "child.out", work / "child.err"
    with output.open("wb") as out, errors.open("wb") as err:
        child = subprocess.Popen(
            [sys.executable, *arguments], stdin=subprocess.DEVNULL, stdout=out, stderr=err
        )
        try:
            while not _ended(child):
                poll(_lines(output)[-1])
        finally:
            child.kill()
            child.wait()
    if child.returncode < 0:
        raise ModelPullError(f"the process was killed ({signal.strsignal(-child.returncode)})")
    if child.returncode > 0:
        raise ModelPullError(_last_error(_lines(errors)))


def _ended(child: subprocess.Popen[bytes]) -> bool:
    try:
        child.wait(_POLL_SECONDS)
    except subprocess.TimeoutExpired:
        return False
    return True


def _lines(log: Path) -> list[str]:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return [line.strip() for line in lines if line.strip()] or [""]


def _last_error(lines: list[str]) -> str:
    """pip marks its errors and may print notices after them; a traceback ends with the error."""
    marked = [line for line in lines if line.startswith("ERROR: ")]
    return (marked or lines)[-1].removeprefix("ERROR: ").rstrip(".")
