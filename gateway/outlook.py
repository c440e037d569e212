"""The costs of a round, as they look before it."""

from __future__ import annotations

from typing import NamedTuple


class Outlook(NamedTuple):
    """The costs of the next round, as they look before it."""

    crowd: float
    """How many other sessions wait while a row is verified."""
    other_rows: float
    wire_us: float
    """Of the exchange with the verifier."""
    first_us: float
    """Of a proposal, whatever its size."""
    step_us: float
    window_us: float = 0.0
    """For which the pass waits for the proposals of others anyway."""

    def draft_us(self, steps: float) -> float:
        """For which the pass waits for a proposal of so many steps."""
        return self.first_us + steps * self.step_us if steps else 0.0
