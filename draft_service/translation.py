"""Between the tokens of a target and those of a draft with another tokenizer, by way of the text.

The committed tokens are decoded, and their text is encoded for the draft; what the draft says is
decoded, and its text is encoded for the target. This is the string-level way of speculating across
vocabularies (arXiv 2502.05202). What comes out is a guess like any other: an alignment that goes
wrong costs accepted tokens and nothing else.

Three places need care. A committed token may end inside a character, which is then *held*: the
draft does not see it, and has to say it before anything is proposed. It may end inside what is one
token to the draft, so the end of the context is encoded anew with every commit, and what was cached
of it is rolled back where it differs. And what the draft says may merge with what is committed, so
both are encoded together, and count only if the committed tokens come out of it again.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

from tokenizers import Encoding, Tokenizer

from draft_service.special_tokens import TokenizerPair

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_MOST_HELD = 3
"""Tokens: an unfinished character has three bytes at most, and a token has at least one."""
_WINDOW = 24
"""Target tokens at the end of the context that may still be encoded in another way."""
_LONGEST_WINDOW = 8 * _WINDOW
_ANCHOR = 8
"""Target tokens before the window that are encoded with it, so that it is not taken for the
beginning of a text, and draft tokens that are decoded with what follows them."""
_CANDIDATES = 32
_TAILS = (16, 4, 1)
"""How many of the committed tokens are encoded together with what the draft says. More of them
give a better encoding, but it takes only one that the target chose against the habits of its own
tokenizer, and they do not come out of it again."""

_FINER = 1.2
"""Tokens of the draft for one of the target from which on the draft counts as the finer one."""
_FIRST_IDEOGRAPH = "\u2e80"


class Translated(NamedTuple):
    """What drafted tokens are to the target."""

    token_ids: list[int]
    """The target's tokens."""
    is_complete: bool
    """Whether nothing that the draft may say after them would be used."""


class Translation:
    """The context of one session as the draft sees it, and what the draft's tokens mean in it.

    Invariant: `ids` are the draft's tokens for the text of all committed tokens but those that are
    held. Each commit costs as much as its own text and a window of bounded length.
    """

    def __init__(self, pair: TokenizerPair) -> None:
        self._pair = pair
        self._target, self._draft = pair.target.tokenizer, pair.draft.tokenizer
        self.ids: list[int] = list(pair.beginning)
        """The context in the draft's tokens. It may be empty."""
        self._settled = len(self.ids)
        """How many of them no commit will change."""
        # The target's tokens since the last special token: first those of whose text the draft's
        # tokens are settled (the last few of them only), then the others.
        self._anchor: list[int] = []
        self._window: list[int] = []
        self._num_held = 0
        """How many of the last tokens in the window are held."""
        self._num_committed = 0
        self._limit = 2 * _WINDOW
        """The length at which the window is shortened."""

    def commit(self, token_ids: Sequence[int]) -> int:
        """Adds committed tokens of the target.

        Returns:
            How many tokens at the beginning of `ids` are as they were.
        """
        start, before = self._settled, self.ids[self._settled :]
        self._num_committed += len(token_ids)
        for token_id in token_ids:
            if token_id not in self._pair.to_draft:
                self._window.append(token_id)
            elif (special := self._pair.to_draft[token_id]) is not None:
                self._end_text(special)
        self._encode_window(hold=True)
        self._shorten_window()
        return start + _agreeing(before, self.ids[start:])

    def translate(self, drafted: Sequence[int], limit: int) -> Translated:
        """What the draft's next tokens are to the target.

        Args:
            drafted: tokens of the draft that follow `ids`.
            limit: how many tokens of the target are wanted, at least 1.
        """
        length = next(
            (i for i, token_id in enumerate(drafted) if token_id in self._pair.to_target),
            len(drafted),
        )
        ends = length < len(drafted)
        text = self._text_of(drafted[:length], unfinished=not ends)
        token_ids = self._follow(text) if text else []
        if ends and (token_ids or (not text and not self._num_held)):
            special = self._pair.to_target.get(drafted[length])
            token_ids += [] if special is None else [special]
        is_complete = ends or self._suffices(text, token_ids, limit)
        return Translated(token_ids[:limit], is_complete)

    def _suffices(self, text: str, token_ids: list[int], limit: int) -> bool:
        """Whether drafting may end: the tokens at the end change when a word is continued.

        One that may change is put up with, rather than another token drafted, unless the draft has
        more tokens for a text than the target, and so nearly always stops inside of a word.
        """
        if len(token_ids) < limit:
            return False
        end = next((i for i in range(len(text) - 1, 0, -1) if not _continues(text[i])), 0)
        settled = _agreeing(self._follow(text[:end]), token_ids) if end else 0
        is_finer = len(self.ids) > _FINER * self._num_committed
        return settled >= (limit if is_finer else limit - 1)

    # From the target to the draft.

    def _end_text(self, special: int) -> None:
        """Ends the text before a special token of the draft, and begins another one after it."""
        self._encode_window(hold=False)
        # A target's BOS may be what the draft's tokenizer has put there already.
        if self.ids != [*self._pair.beginning] or self.ids[-1:] != [special]:
            self.ids.append(special)
        self._settled = len(self.ids)
        self._anchor, self._window, self._limit = [], [], 2 * _WINDOW

    def _encode_window(self, *, hold: bool) -> None:
        """Encodes the text of the window for the draft."""
        text, begin, self._num_held = self._window_text(hold=hold)
        self.ids[self._settled :] = _encode_from(self._draft, text, begin)

    def _window_text(self, *, hold: bool) -> tuple[str, int, int]:
        """The text of anchor and window, where the window's begins, how many tokens are held."""
        known = [*self._anchor, *self._window]
        text, num_held = _decode(self._target, known), 0
        if hold and text.endswith(_REPLACEMENT):
            for count in range(1, min(_MOST_HELD, len(self._window)) + 1):
                shorter = _decode(self._target, known[:-count])
                if not shorter.endswith(_REPLACEMENT):
                    text, num_held = shorter, count
                    break
        anchor = _decode(self._target, self._anchor)
        if text.startswith(anchor):
            return text, len(anchor), num_held
        return _decode(self._target, self._window[: len(self._window) - num_held]), 0, num_held

    def _shorten_window(self) -> None:
        """Settles the beginning of a window that has become long.

        That is possible where a token of the target and one of the draft begin together, best at
        the beginning of a word, and where what follows is encoded as before without the rest.
        """
        if len(self._window) <= self._limit:
            return
        text, begin, num_held = self._window_text(hold=True)
        encoding = self._draft.encode(text, add_special_tokens=False)
        first = _boundary(encoding, begin)
        shown = self._window[: len(self._window) - num_held]
        if first is None:
            # It was encoded alone, as it is in `_encode_window`.
            text = text[begin:]
            encoding, first = self._draft.encode(text, add_special_tokens=False), 0
        last = len(shown) - _WINDOW
        splits = range(last, max(last - _CANDIDATES, _ANCHOR), -1)
        for at_words in (True, False):
            for split in splits:
                anchor = shown[split - _ANCHOR : split]
                start = _decode(self._target, anchor)
                rest = _decode(self._target, [*anchor, *shown[split:]])
                kept = rest[len(start) :]
                if not rest.startswith(start) or not text.endswith(kept):
                    continue
                if at_words and not kept[:1].isspace():
                    continue
                end = _boundary(encoding, len(text) - len(kept))
                if end is None or encoding.ids[end:] != _encode_from(self._draft, rest, len(start)):
                    continue
                self._settled += end - first
                self._anchor, self._window = anchor, self._window[split:]
                self._limit = 2 * _WINDOW
                return
        if len(self._window) < _LONGEST_WINDOW:
            # It is looked for again when that has become worth the effort.
            self._limit = 2 * len(self._window)
            return
        # There is hardly such a place in this text: what follows is encoded on its own.
        self._settled = len(self.ids)
        self._anchor, self._window = shown[-_ANCHOR:], self._window[len(shown) :]
        self._limit = 2 * _WINDOW

    # From the draft to the target.

    def _text_of(self, drafted: Sequence[int], *, unfinished: bool) -> str:
        """The text of drafted tokens, without a character at its end that may be `unfinished`."""
        context, before = self.ids[-_ANCHOR:], ""
        for length in range(_ANCHOR, 4 * _ANCHOR):
            context = self.ids[-length:]
            before = _decode(self._draft, context)
            # It may begin inside a character, or a run of byte tokens that are decoded together.
            if not before.startswith(_REPLACEMENT):
                break
        after = _decode(self._draft, [*context, *drafted])
        if not after.startswith(before):
            return ""
        text = after[len(before) :]
        return text.rstrip(_REPLACEMENT) if unfinished else text

    def _follow(self, text: str) -> list[int]:
        """The target's tokens for a text that follows the committed tokens but the held ones.

        They follow *all* committed tokens. There are none if the text contradicts what is held.
        """
        known = [*self._anchor, *self._window]
        held = self._num_held
        for length in _TAILS:
            tail = known[-length - held :]
            shown = _decode(self._target, tail[: len(tail) - held])
            together = self._target.encode(shown + text, add_special_tokens=False).ids
            if together[: len(tail)] == tail:
                return together[len(tail) :]
        if held:
            return []
        # The text would have merged with what is committed, which it did not: it stands alone, but
        # not at the beginning of a text.
        tail = known[-_ANCHOR:]
        whole = _decode(self._target, tail) + text
        for lead in ("\n", ""):
            alone = _encode_from(self._target, lead + text, len(lead))
            if _decode(self._target, [*tail, *alone]) == whole:
                return alone
        return []


def _continues(character: str) -> bool:
    """Whether it continues the word before it. Ideographs are words of their own."""
    return character.isalnum() and character < _FIRST_IDEOGRAPH


def _decode(tokenizer: Tokenizer, token_ids: Sequence[int]) -> str:
    text: str = tokenizer.decode(token_ids, skip_special_tokens=True)
    return text


def _encode_from(tokenizer: Tokenizer, text: str, begin: int) -> list[int]:
    """The tokens of `text[begin:]`, encoded together with what stands before it."""
    if begin == len(text):
        return []
    encoding = tokenizer.encode(text, add_special_tokens=False)
    first = _boundary(encoding, begin)
    if first is None:
        return list(tokenizer.encode(text[begin:], add_special_tokens=False).ids)
    return list(encoding.ids[first:])


def _boundary(encoding: Encoding, place: int) -> int | None:
    """How many tokens end at a place in the text or before it, or None if one lies across it."""
    offsets = encoding.offsets
    first = bisect_left(offsets, place, key=lambda offset: offset[0])
    if first > 0 and offsets[first - 1][1] > place:
        return None
    return first


def _agreeing(a: Sequence[int], b: Sequence[int]) -> int:
    """The length of the common beginning."""
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )
