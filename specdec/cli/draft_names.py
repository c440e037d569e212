"""The drafts that a command line names, and how each is started."""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path

from specdec import services
from specdec.cli import pair
from specdec.cli.supervisor import Child

_DEFAULT = ("default", "model")
_BUILT_IN = ("lookup", "suffix")
_ADDRESS = re.compile(r"(\[[0-9a-fA-F:]+\]|[\w.-]+):\d{1,5}")


@dataclass(frozen=True)
class NamedDraft:
    """A draft to be started, or one that runs."""

    name: str
    """As it was given."""
    address: str | None = None
    """host:port of one that runs."""
    drafters: tuple[str, ...] = ("model",)
    """For `specdec draft --drafters`."""
    model: str | None = None
    """Hub id, folder or GGUF file; None for the embedded default draft, if there is a model."""

    def child(self, options: tuple[str, ...]) -> Child:
        """The service to run on a free port, with further arguments."""
        arguments = (
            *("--drafters", ",".join(self.drafters)),
            *(("--model", self.model) if self.model else ()),
            *options,
        )
        return Child(services.DRAFT, "draft_service", pair.free_ports()[1], arguments)


def parse(text: str) -> list[NamedDraft]:
    """Reads a list of drafts, separated by commas.

    A draft is `default`, the name of a drafter, a hub id, a folder, a GGUF file or host:port; or
    drafters and at most one model, joined by + in the order in which they are asked.

    Raises:
        ValueError: a name is empty, or is a combination that cannot be.
    """
    return [_parse(name) for name in dict.fromkeys(text.split(","))]


def _parse(name: str) -> NamedDraft:
    if not name:
        raise ValueError("there is an empty name in the list")
    if Path(name).exists():
        return NamedDraft(name, model=name)
    if _ADDRESS.fullmatch(name):
        return NamedDraft(name, address=name)
    known = {*_BUILT_IN, *(point.name for point in entry_points(group="specdec.drafters"))}
    drafters: list[str] = []
    model: str | None = None
    for part in name.split("+"):
        if not part:
            raise ValueError(f"{name!r} has an empty part")
        drafter = part if part in known and part not in _DEFAULT else "model"
        if drafter in drafters:
            twice = "two models" if drafter == "model" else f"{part} twice"
            raise ValueError(f"{name!r} names {twice}")
        drafters.append(drafter)
        if drafter == "model" and part not in _DEFAULT:
            model = part
    return NamedDraft(name, drafters=tuple(drafters), model=model)
