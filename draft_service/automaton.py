"""A suffix automaton: an index of all substrings of a text, built token by token.

Blumer et al., "The smallest automaton recognizing the subwords of a text", Theoretical Computer
Science 40 (1985). Each state stands for the substrings that end at the same places of the text; its
link leads to the longest suffix of these that also ends elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence

from draft_service.matching import MIN_LENGTH, Index, Match

ROOT = 0
"""The state of the empty string."""
_MOST_MARKS = 32
"""How many states remember with each token that they occurred here."""


class SuffixAutomaton(Index):
    """The text so far, and the longest of its suffixes that occurred before, of whatever length.

    A token costs constant time, amortised, and the text at most two states a token. Of the places
    where a match occurred the most recent one is known, because each token marks the states of the
    suffixes that end with it. Only the longest 32 of these are marked: a text in which more are
    nested into each other repeats one thing many times, and any of the places is as good.
    """

    def __init__(self) -> None:
        super().__init__()
        self.lengths = [0]
        """Of the longest substring of each state."""
        self.links = [-1]
        self.transitions: list[dict[int, int]] = [{}]
        """Of each state: where a token leads."""
        self.places = [0]
        """Of each state: what followed its substrings most recently, as an index into the text."""
        self._last = ROOT
        """The state of the whole text."""
        self._match = Match(0, 0)

    def extend(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            self._append(token_id)

    def match(self) -> Match | None:
        return self._match if self._match.length >= MIN_LENGTH else None

    def _append(self, token_id: int) -> None:
        self.tokens.append(token_id)
        state = self._add_state(len(self.tokens), {})
        before = self._last
        while before >= 0 and token_id not in self.transitions[before]:
            self.transitions[before][token_id] = state
            before = self.links[before]
        self.links[state] = ROOT if before < 0 else self._target(before, token_id)
        self._last = state
        suffix = self.links[state]
        self._match = Match(self.lengths[suffix], self.places[suffix])
        self._mark(suffix)

    def _target(self, state: int, token_id: int) -> int:
        """The state of the longest substring of `state` followed by the token, made if need be."""
        target = self.transitions[state][token_id]
        length = self.lengths[state] + 1
        if self.lengths[target] == length:
            return target
        # The shorter substrings of the target now also end here, where the longer ones do not.
        split = self._add_state(length, dict(self.transitions[target]))
        self.links[split] = self.links[target]
        self.places[split] = self.places[target]
        self.links[target] = split
        while state >= 0 and self.transitions[state].get(token_id) == target:
            self.transitions[state][token_id] = split
            state = self.links[state]
        return split

    def _add_state(self, length: int, transitions: dict[int, int]) -> int:
        self.lengths.append(length)
        self.links.append(-1)
        self.transitions.append(transitions)
        self.places.append(len(self.tokens))
        return len(self.lengths) - 1

    def _mark(self, state: int) -> None:
        place = len(self.tokens)
        for _ in range(_MOST_MARKS):
            if state == ROOT:
                break
            self.places[state] = place
            state = self.links[state]


class Cursor:
    """Where the end of another text stands in an automaton, which may grow meanwhile."""

    def __init__(self, automaton: SuffixAutomaton) -> None:
        self._automaton = automaton
        self._state = ROOT
        self._length = 0
        """Of the longest suffix of the other text that occurs in the automaton's."""

    def advance(self, token_id: int) -> None:
        """Appends a token to the other text, in constant time, amortised."""
        at = self._automaton
        self._settle()
        while token_id not in at.transitions[self._state]:
            if self._state == ROOT:
                return
            self._state = at.links[self._state]
            self._length = at.lengths[self._state]
        self._state = at.transitions[self._state][token_id]
        self._length += 1

    def match(self) -> Match | None:
        """The longest suffix that something followed, and the most recent place of that.

        Negative numbers are no tokens: they part one text of the automaton from the next.
        """
        at = self._automaton
        self._settle()
        state, length = self._state, self._length
        while length >= MIN_LENGTH:
            followers = at.transitions[state].items()
            place = max(
                (at.places[after] for token_id, after in followers if token_id >= 0), default=0
            )
            if place > 0:
                return Match(length, place - 1)
            state = at.links[state]
            length = at.lengths[state]
        return None

    def _settle(self) -> None:
        """Goes to the state that the suffix belongs to, if its own was split."""
        at = self._automaton
        while self._state != ROOT and self._length <= at.lengths[at.links[self._state]]:
            self._state = at.links[self._state]
