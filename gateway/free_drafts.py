"""Drafts at no cost, where drafts that cost something do not pay.

What is copied from the text costs the draft service nothing but the question. While a model does
not pay it is asked for that alone, as long as there is something now and then.
"""

from __future__ import annotations

_PATIENCE = 4
"""Questions in a row that may find nothing."""
_LONGEST_PAUSE = 32
"""Rounds between questions, once nothing was found for long. Each costs a round trip."""


class FreeDrafts:
    """When a session asks for them."""

    def __init__(self) -> None:
        self._failures = 0
        self._pause = 0
        """Rounds until the next question."""

    def wanted(self) -> bool:
        """Whether to ask in this round. To be called once for each round in which it could."""
        if self._pause:
            self._pause -= 1
            return False
        return True

    def observe(self, *, found: bool) -> None:
        """Says whether there was one, after a round that asked."""
        self._failures = 0 if found else self._failures + 1
        excess = self._failures - _PATIENCE
        self._pause = min(2**excess, _LONGEST_PAUSE) if excess >= 0 else 0
