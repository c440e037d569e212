"""Which tokens a grammar allows at each position of a block."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import takewhile

import numpy as np
import numpy.typing as npt
import torch
from llguidance import LLMatcher, LLTokenizer
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask

from specdec.errors import SpecdecError, Violation
from specdec.grammar import TOO_COMPLEX, limits, source
from specdec.v1 import common_pb2


class GrammarState:
    """How far an output has come in its grammar."""

    def __init__(self, matcher: LLMatcher, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._eos_token_ids = list(eos_token_ids)

    def allowed(self, drafted: Sequence[int], first: int = 0) -> torch.Tensor:
        """The tokens that may come after `drafted[:first]`, …, after all of `drafted`.

        Returns:
            bool [len(drafted) + 1 − first, V]. Rows after a drafted token that is not allowed, or
            that ends the output, are all true: nothing is ever sampled from them.

        Raises:
            SpecdecError: INVALID_REQUEST, the grammar became too complex, or no token can go on.
        """
        rows = np.ones((len(drafted) + 1 - first, self._vocab_size), dtype=np.bool_)
        before = list(takewhile(lambda t: t not in self._eos_token_ids, drafted[:first]))
        consumed = self._matcher.try_consume_tokens(before)
        if consumed < first:
            self._matcher.rollback(consumed)
            return torch.from_numpy(rows)
        for row, token_id in zip(rows, [*drafted[first:], None], strict=True):
            self._fill(row)
            if consumed == 0 and not row.any():
                raise SpecdecError.invalid(
                    [
                        Violation(
                            "sampling.grammar", "no token of the model's vocabulary continues it"
                        )
                    ]
                )
            if token_id is None or token_id in self._eos_token_ids or not row[token_id]:
                break
            self._matcher.consume_token(token_id)
            consumed += 1
        self._matcher.rollback(consumed)
        return torch.from_numpy(rows)

    def commit(self, token_ids: Sequence[int]) -> None:
        """Moves on by tokens that were allowed.

        What follows an end-of-sequence token in a block is nobody's: it is discarded by whoever
        commits the block to the client.

        Raises:
            SpecdecError: INVALID_REQUEST, the grammar became too complex; CONTRACT_VIOLATION, they
                were not allowed.
        """
        inside = list(takewhile(lambda t: t not in self._eos_token_ids, token_ids))
        if not inside:
            return
        fitting = self._matcher.validate_tokens(inside)
        self._require_no_error()
        if fitting < len(inside):
            raise SpecdecError(
                common_pb2.ERROR_REASON_CONTRACT_VIOLATION,
                "the committed tokens do not fit the session's grammar",
            )
        self._matcher.consume_tokens(inside)
        self._require_no_error()

    def _fill(self, row: npt.NDArray[np.bool_]) -> None:
        self._require_no_error()
        if self._matcher.is_stopped():
            # Complete, with no way to go on: the matcher itself would take nothing more.
            row[:] = False
            row[self._eos_token_ids] = True
            return
        bits = allocate_token_bitmask(1, self._vocab_size)
        fill_next_token_bitmask(self._matcher, bits)
        self._require_no_error()
        row[:] = np.unpackbits(bits.view(np.uint8), bitorder="little")[: self._vocab_size]

    def _require_no_error(self) -> None:
        # A matcher that gave up looks as if it was complete.
        if self._matcher.is_error():
            raise SpecdecError.invalid([Violation("sampling.grammar", TOO_COMPLEX)])


class GrammarCompiler:
    """Compiles grammars for one model's tokenizer."""

    def __init__(self, tokenizer: bytes, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """
        Args:
            tokenizer: in the JSON format of the `tokenizers` library.
            vocab_size: the effective vocabulary size.
            eos_token_ids: what may come when the grammar is complete.
        """
        self._tokenizer_json = tokenizer.decode()
        self._vocab_size = vocab_size
        self._eos_token_ids = list(eos_token_ids)

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        # Made at the first grammar: it takes about a second for a large vocabulary.
        return LLTokenizer(
            self._tokenizer_json, n_vocab=self._vocab_size, eos_token=self._eos_token_ids
        )

    def start(self, grammar: common_pb2.Grammar) -> GrammarState:
        """The state of an empty output.

        Raises:
            ValueError: the grammar is wrong.
        """
        matcher = LLMatcher(self._tokenizer, source(grammar), log_level=0, limits=limits())
        if matcher.is_error():
            raise ValueError(matcher.get_error())
        return GrammarState(matcher, self._vocab_size, self._eos_token_ids)
