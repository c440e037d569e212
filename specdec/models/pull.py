"""The default target brought into the cache: all of it or nothing."""

import os
import shutil
import tempfile
from pathlib import Path

from specdec.models.cache import default_target_path, is_pulled
from specdec.models.child import ModelPullError
from specdec.models.convert import check_can_convert, convert_gguf
from specdec.models.download import Report, fetch_gguf

# The unpacked GGUF file and the converted model, which is the largest moment of a pull.
_NEEDED_BYTES = 400_000_000


def pull_default_target(source: Path | None, report: Report) -> Path:
    """Fetch and convert the default target model, unless it is in the cache.

    All work happens in a temporary folder beside the model's, and the result is renamed into place
    when it is whole. So an interrupted pull leaves nothing, and of two pulls at once the later
    adopts the result of the earlier.

    Args:
        source: A local wheel or GGUF file, or None to download.
        report: Told of progress.

    Returns:
        The model's folder, for `from_pretrained`.

    Raises:
        ModelPullError: It cannot be had; the text says what to do.
    """
    target = default_target_path()
    if is_pulled(target):
        return target
    check_can_convert()
    try:
        _check_room(target)
        with tempfile.TemporaryDirectory(prefix=".pull-", dir=target.parent) as name:
            work = Path(name)
            gguf = fetch_gguf(source, work, report)
            convert_gguf(gguf, work / "model", target.name, work, report)
            _publish(work / "model", target)
    except OSError as error:
        raise ModelPullError(
            f"cannot use {error.filename or target.parent} ({error.strerror or error}): check its "
            "permissions and the free space, or set SPECDEC_CACHE_DIR to another folder"
        ) from error
    return target


def _check_room(target: Path) -> None:
    if target.exists() and not is_pulled(target):
        raise ModelPullError(f"{target} exists but holds no complete model: remove it, pull again")
    target.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(target.parent).free
    if free < _NEEDED_BYTES:
        raise ModelPullError(
            f"{target.parent} has {free // 10**6} MB free and {_NEEDED_BYTES // 10**6} MB are "
            "needed: make room, or set SPECDEC_CACHE_DIR to another folder"
        )


def _publish(folder: Path, target: Path) -> None:
    try:
        os.rename(folder, target)
    except OSError:
        if not is_pulled(target):
            raise
