"""The commit path: the one function through which every token of every client goes.

A verdict holds several tokens. Everything that ends a generation or counts what it gave (stop
tokens, stop strings, limits, usage, detokenization) looks at one token at a time, here and nowhere
else, so that a block of tokens means exactly what single tokens would.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tokenizers import Tokenizer

from gateway.detokenizer import Detokenizer
from specdec.v1 import gateway_pb2


@dataclass(frozen=True)
class Stopping:
    """When a generation ends."""

    max_new_tokens: int
    """Already clamped to what the context length leaves."""
    stop_token_ids: frozenset[int] = frozenset()
    """With the end-of-sequence tokens, unless those are to be ignored."""
    stop_strings: tuple[str, ...] = ()
    min_new_tokens: int = 0
    """Before so many tokens no stop string is looked for; the target samples no stop token."""
    include_stop_string: bool = False
    """Whether the text includes what ended it."""
    skip_special_tokens: bool = True


@dataclass
class Output:
    """What a generation has given its client so far."""

    tokenizer: Tokenizer
    stopping: Stopping
    token_count: int = 0
    finish_reason: gateway_pb2.FinishReason.ValueType = gateway_pb2.FINISH_REASON_UNSPECIFIED
    matched: int | str | None = None
    """The stop token id or stop string that occurred."""
    _detokenizer: Detokenizer = field(init=False)
    _withheld: str = field(init=False, default="")
    """Text that may still turn out to be the beginning of a stop string."""

    def __post_init__(self) -> None:
        self._detokenizer = Detokenizer(
            self.tokenizer, skip_special_tokens=self.stopping.skip_special_tokens
        )

    @property
    def room(self) -> int:
        """How many more tokens it may have."""
        return self.stopping.max_new_tokens - self.token_count

    @property
    def finished(self) -> bool:
        """Whether no further token may be committed."""
        return self.finish_reason != gateway_pb2.FINISH_REASON_UNSPECIFIED

    def commit(self, token_id: int) -> str:
        """Commits one token. Must not be called once finished.

        Returns:
            The text that is released by it. It lags behind the tokens by what is withheld.
        """
        self.token_count += 1
        if token_id in self.stopping.stop_token_ids:
            if self.stopping.include_stop_string:
                # No stop string is looked for in its text: what ended the generation is the token.
                self.finish_reason, self.matched = gateway_pb2.FINISH_REASON_STOP, token_id
                text, self._withheld = self._withheld, ""
                return text + self._detokenizer.add(token_id) + self._detokenizer.end()
            return self._finish(gateway_pb2.FINISH_REASON_STOP, token_id)
        text = self._release(self._detokenizer.add(token_id))
        # A stop at the limit is a stop.
        if not self.finished and self.token_count == self.stopping.max_new_tokens:
            text += self._finish(gateway_pb2.FINISH_REASON_LENGTH, None)
        return text

    def _finish(self, reason: gateway_pb2.FinishReason.ValueType, matched: int | str | None) -> str:
        """Ends the generation. Returns the last text, in which a stop string may yet be found."""
        text = self._release(self._detokenizer.end())
        if not self.finished:
            self.finish_reason, self.matched = reason, matched
            text, self._withheld = text + self._withheld, ""
        return text

    def _release(self, text: str) -> str:
        """Adds text to what is withheld and takes from it what can go out."""
        old = len(self._withheld)
        text = self._withheld + text
        # One that ends in what was withheld was complete before the minimum, and does not count.
        found = [
            (at, stop)
            for stop in self.stopping.stop_strings
            if (at := text.find(stop, max(old - len(stop) + 1, 0))) >= 0
        ]
        if found and self.token_count >= self.stopping.min_new_tokens:
            at, stop = min(found)
            self.finish_reason, self.matched = gateway_pb2.FINISH_REASON_STOP, stop
            self._withheld = ""
            return text[: at + len(stop) if self.stopping.include_stop_string else at]
        keep = max((_overlap(text, stop) for stop in self.stopping.stop_strings), default=0)
        self._withheld = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of `text` that is a beginning of `stop`."""
    return next(
        (n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0
    )
