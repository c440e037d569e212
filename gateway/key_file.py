"""The file of API keys: for each tenant the hashes of its keys, and its limits.

A key has 256 random bits. That is more than can be tried, so that its SHA-256 gives nothing away
and needs neither salt nor a slow hash, which are for what people choose.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import tempfile
from pathlib import Path
from typing import Annotated

import yaml
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

_PREFIX = "sd-"
"""Of every key: one that is where it should not be is known for what it is."""

_Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._@-]{1,64}$")]
_Digest = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
_CONFIG = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class KeyFileError(Exception):
    """A file of keys cannot be used. The message says why, and quotes none of it."""


class Account(BaseModel):
    """What the file says of a tenant."""

    model_config = _CONFIG

    sha256: tuple[_Digest, ...] = Field(min_length=1)
    """Of the keys, in hexadecimal: several while one is being replaced."""
    max_sessions: int | None = Field(None, ge=1)
    """That run or wait at once. A session is one sample of a call."""
    requests_per_minute: float | None = Field(None, gt=0.0)
    tokens_per_minute: float | None = Field(None, gt=0.0)
    """Of prompts and of what was generated."""
    weight: float = Field(1.0, gt=0.0)
    """The tenant's share, against those of others, of what is given while calls wait."""


class _Document(BaseModel):
    model_config = _CONFIG

    tenants: dict[_Name, Account]


def new_key() -> str:
    """A key that nobody has."""
    return _PREFIX + secrets.token_urlsafe(32)


def digest_of(key: str) -> str:
    """What the file holds of a key."""
    return hashlib.sha256(key.encode()).hexdigest()


def parse(content: bytes) -> dict[str, Account]:
    """The tenants of a file, YAML or JSON, by their names.

    Raises:
        KeyFileError: it is broken, or a key is there twice.
    """
    try:
        tenants = _Document.model_validate(yaml.safe_load(content)).tenants
    except yaml.MarkedYAMLError as error:
        where = f" (line {error.problem_mark.line + 1})" if error.problem_mark else ""
        raise KeyFileError(f"it is neither YAML nor JSON{where}") from None
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        if not isinstance(error, ValidationError):
            raise KeyFileError("it is neither YAML nor JSON") from None
        # What is wrong is not quoted: it might be a key that was taken for its hash.
        faults = (f"{'.'.join(map(str, e['loc'])) or 'file'}: {e['msg']}" for e in error.errors())
        raise KeyFileError("; ".join(faults)) from None
    digests = [digest for account in tenants.values() for digest in account.sha256]
    if len(set(digests)) < len(digests):
        raise KeyFileError("a key is there twice")
    return tenants


def add_key(path: Path, name: str, key: str) -> None:
    """Adds the hash of a key to a file, which is made if it is not there.

    Raises:
        KeyFileError: the file or the name cannot be used, or it has comments, which would be lost.
        OSError: it cannot be read or written.
    """
    content = path.read_bytes() if path.exists() else b"tenants: {}\n"
    parse(content)
    if any(line.lstrip().startswith(b"#") for line in content.splitlines()):
        raise KeyFileError("it has comments, which would be lost; add the entry by hand")
    document = yaml.safe_load(content)
    account = document["tenants"].setdefault(name, {"sha256": []})
    account["sha256"].append(digest_of(key))
    changed = yaml.safe_dump(document, sort_keys=False).encode()
    parse(changed)
    _replace(path, changed)


def _replace(path: Path, content: bytes) -> None:
    """Writes a file at once: whoever reads it finds the old content or the new."""
    path = path.resolve()
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            if path.exists():
                os.fchmod(file.fileno(), path.stat().st_mode & 0o777)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
