"""Token ids to text, one token at a time."""

from __future__ import annotations

from tokenizers import Tokenizer

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Detokenizer:
    """Decodes a growing sequence of ids. The pieces concatenate to the decoding of the whole.

    A piece waits while what comes next could change it: while the bytes at its end are an
    unfinished UTF-8 sequence, and with decoders of byte tokens, which give up a whole run of them
    for one bad byte, while the run goes on. Only a window of the last ids is decoded again at each
    step, because some decoders look at a token's neighbours.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        """`skip_special_tokens`: whether special tokens have no text."""
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._skipped = {
            token_id
            for token_id, token in tokenizer.get_added_tokens_decoder().items()
            if token.special and skip_special_tokens
        }
        bad_byte = tokenizer.token_to_id("<0xFF>")
        self._bad_byte = [] if bad_byte is None else [bad_byte]
        """A token that no UTF-8 sequence contains, if the decoder has byte tokens."""
        self._ids: list[int] = []
        self._window = 0
        """Where the window that is decoded begins: one settled piece before the unsettled one."""
        self._settled = 0
        """How many ids have become text that no later token changes."""

    def add(self, token_id: int) -> str:
        """Adds a token. Returns the text that is now settled, possibly none."""
        if token_id in self._skipped:
            return ""
        self._ids.append(token_id)
        before = self._decode(self._ids[self._window : self._settled])
        after = self._decode(self._ids[self._window :])
        if len(after) <= len(before) or after.endswith(_REPLACEMENT):
            return ""
        if self._bad_byte:
            worst = self._decode(self._ids[self._window :] + self._bad_byte)
            if not worst.startswith(after):
                return ""
        self._window, self._settled = self._settled, len(self._ids)
        return after[len(before) :]

    def end(self) -> str:
        """The rest: what no later token will complete."""
        before = self._decode(self._ids[self._window : self._settled])
        rest = self._decode(self._ids[self._window :])[len(before) :]
        self._settled = len(self._ids)
        return rest

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip_special_tokens)
