"""What target and draft expect at each position of texts that the target wrote: the file."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int32]


@dataclass(frozen=True)
class DistributionLog:
    """M positions of some texts, one text after the other.

    The token that was written is always among those that are kept, in the last place if it is not
    as probable as they are. Nothing else is known of the rest of a distribution.
    """

    temperature: float
    """At which the texts were written."""
    tokens: Ids
    """[M], what the target wrote."""
    begins: Ids
    """[texts + 1]: where each text begins, and the end of the last."""
    p_ids: Ids
    """[M, N], of the target."""
    p: Floats
    """[M, N], log-probabilities at temperature 1."""
    q_ids: Ids
    """[M, N], of the draft."""
    q: Floats

    def write(self, file: Path) -> None:
        """Writes it, the log-probabilities as 16-bit floats."""
        halves = {"p": self.p.astype(np.float16), "q": self.q.astype(np.float16)}
        np.savez_compressed(file, **{**vars(self), **halves})

    @classmethod
    def read(cls, file: Path) -> Self:
        """Reads a file that `write` wrote."""
        with np.load(file) as found:
            kept: dict[str, Any] = {name: found[name] for name in found.files}
        kept["temperature"] = float(kept["temperature"])
        for name in ("p", "q"):
            kept[name] = kept[name].astype(np.float64)
        return cls(**kept)

    def texts(self) -> Iterator[slice]:
        """The positions of each text."""
        for begin, end in zip(self.begins[:-1], self.begins[1:], strict=True):
            yield slice(int(begin), int(end))
