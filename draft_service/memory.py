"""Past outputs, for those who may see them.

That what was answered once is likely to be answered again in part is the idea of REST (arXiv
2311.08252) and SuffixDecoding (arXiv 2411.04975).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence

from draft_service.automaton import Cursor, SuffixAutomaton
from draft_service.matching import PIECE, Match

_VOLUMES = 4
"""Into so many parts a full memory is divided: the oldest is dropped as a whole."""
_LEAD = 64
"""How many tokens of a running session a volume is compared with that it did not know."""


class Volume:
    """Outputs of one tenant, one after the other in one automaton."""

    def __init__(self) -> None:
        self.automaton = SuffixAutomaton()
        self.seeds: set[int] = set()
        """Of the sessions whose outputs are here."""
        self.num_tokens = 0
        self._waiting: deque[int] = deque()
        self._num_outputs = 0

    def add(self, output: Sequence[int], seed: int) -> None:
        """Adds an output, which is taken in when somebody wants to read."""
        self._num_outputs += 1
        self._waiting += output
        # No token, and another one each time: no match goes past it.
        self._waiting.append(-self._num_outputs)
        self.seeds.add(seed)
        self.num_tokens += len(output)

    async def settle(self) -> None:
        """Takes in what is waiting, piece by piece, so that the event loop stays responsive."""
        while self._waiting:
            count = min(PIECE, len(self._waiting))
            self.automaton.extend([self._waiting.popleft() for _ in range(count)])
            await asyncio.sleep(0)


class OutputMemory:
    """The outputs of past sessions, by their salts. It holds no more than its limit of tokens."""

    def __init__(self, max_tokens: int) -> None:
        self.num_tokens = 0
        """How many are remembered."""
        self._max_tokens = max_tokens
        self._salts: dict[Volume, str] = {}
        """Of all volumes, those first to which nothing was added for the longest time."""
        self._tenants: dict[str, list[Volume]] = {}

    def remember(self, salt: str, output: Sequence[int], seed: int) -> None:
        """Adds an output. The oldest are dropped if there are too many."""
        capacity = self._max_tokens // _VOLUMES
        output = output[-capacity:]
        if not output:
            return
        volumes = self._tenants.setdefault(salt, [])
        if not volumes or volumes[-1].num_tokens + len(output) > capacity:
            volumes.append(Volume())
        volume = volumes[-1]
        volume.add(output, seed)
        self._salts.pop(volume, None)
        self._salts[volume] = salt
        self.num_tokens += len(output)
        while self.num_tokens > self._max_tokens:
            self._drop_oldest()

    def volumes(self, salt: str) -> Sequence[Volume]:
        """Those of one tenant."""
        return self._tenants.get(salt, ())

    def _drop_oldest(self) -> None:
        volume = next(iter(self._salts))
        salt = self._salts.pop(volume)
        self.num_tokens -= volume.num_tokens
        volumes = self._tenants[salt]
        volumes.remove(volume)
        if not volumes:
            del self._tenants[salt]


class Reader:
    """A session's view of its tenant's past outputs."""

    def __init__(self, memory: OutputMemory, salt: str, own_seed: int | None) -> None:
        """
        Args:
            memory: to read.
            salt: of the session.
            own_seed: of the session, if its drafts have to be independent of its random numbers.
                An output that came of the same seed is not: it was decided by the same numbers.
        """
        self._memory = memory
        self._salt = salt
        self._own_seed = own_seed
        self._cursors: dict[Volume, Cursor] = {}

    async def settle(self) -> None:
        """Has everything taken in that was remembered until now."""
        for volume in list(self._memory.volumes(self._salt)):
            await volume.settle()

    def advance(self, text: Sequence[int], count: int) -> None:
        """Says that `text` now is the session's, of which the last `count` tokens are new."""
        cursors = self._cursors
        self._cursors = {}
        for volume in self._memory.volumes(self._salt):
            cursor = cursors.get(volume)
            new = count
            if cursor is None:
                cursor, new = Cursor(volume.automaton), max(count, _LEAD)
            for token_id in text[-new:] if new else ():
                cursor.advance(token_id)
            self._cursors[volume] = cursor

    def match(self) -> tuple[Match, SuffixAutomaton] | None:
        """The longest match and where it is, the newest of several of equal length."""
        if any(self._own_seed in volume.seeds for volume in self._cursors):
            return None
        best = None
        for volume, cursor in self._cursors.items():
            found = cursor.match()
            if found is not None and (best is None or found.length >= best[0].length):
                best = found, volume.automaton
        return best
