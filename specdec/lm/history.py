"""What the processors of one session know of its history."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from specdec.lm.grammar import GrammarState
from specdec.lm.processing import Rows, is_greedy, join
from specdec.trees import is_chain, path
from specdec.v1 import common_pb2


class History:
    """Makes the `Rows` of a session's blocks, each row as of its own place in the output."""

    def __init__(
        self,
        sampling: common_pb2.Sampling,
        prompt_token_ids: Sequence[int],
        vocab_size: int,
        device: torch.device,
        grammar: GrammarState | None,
    ) -> None:
        """
        Args:
            sampling: the session's settings.
            prompt_token_ids: the prompt; what is already committed follows by `commit`.
            vocab_size: the effective vocabulary size, V.
            device: of the logits.
            grammar: the state of an empty output, if the output has to have a form.
        """
        self._sampling = sampling
        self._grammar = grammar
        self._num_output = 0
        self._device = device

        def column(value: float, dtype: torch.dtype = torch.float64) -> torch.Tensor:
            return torch.tensor([[value]], dtype=dtype, device=device)

        self._columns = {
            "temperature": column(sampling.temperature),
            "top_k": column(sampling.top_k, torch.int64),
            "top_p": column(sampling.top_p),
            "min_p": column(sampling.min_p),
            "repetition_penalty": column(sampling.repetition_penalty),
            "presence_penalty": column(sampling.presence_penalty),
            "frequency_penalty": column(sampling.frequency_penalty),
        }
        self._bias: torch.Tensor | None = None
        if sampling.logit_bias:
            self._bias = torch.zeros(vocab_size, dtype=torch.float64, device=device)
            ids = list(sampling.logit_bias)
            values = [sampling.logit_bias[token_id] for token_id in ids]
            self._bias[ids] = torch.tensor(values, dtype=torch.float64, device=device)
        self._seen: torch.Tensor | None = None
        if sampling.repetition_penalty != 1.0:
            self._seen = torch.zeros(vocab_size, dtype=torch.bool, device=device)
            self._seen[list(prompt_token_ids)] = True
        self._counts: torch.Tensor | None = None
        if sampling.presence_penalty or sampling.frequency_penalty:
            self._counts = torch.zeros(vocab_size, dtype=torch.float64, device=device)
        self._forbidden = torch.zeros(vocab_size, dtype=torch.bool, device=device)
        if sampling.allowed_token_ids:
            self._forbidden[:] = True
            self._forbidden[list(sampling.allowed_token_ids)] = False
        self._forbidden[list(sampling.suppressed_token_ids)] = True
        self._forbids_always = bool(self._forbidden.any())

    @property
    def is_plain_greedy(self) -> bool:
        """Whether the next token is the argmax of the logits as they are."""
        return is_greedy(self._sampling) and self._is_memoryless and self._keeps_logits

    @property
    def is_tempered(self) -> bool:
        """Whether scores are the logits, divided by the temperature if there is one."""
        sampling = self._sampling
        cuts = sampling.top_k > 0 or sampling.top_p < 1.0 or sampling.min_p > 0.0
        return (is_greedy(sampling) or not cuts) and self._is_memoryless and self._keeps_logits

    @property
    def _keeps_logits(self) -> bool:
        """Whether no logit is changed, whatever came before."""
        return self._bias is None and not self._forbids_always

    def rows(self, drafted: Sequence[int], first: int = 0) -> Rows:
        """How to process the logits after `drafted[:first]`, …, after all of `drafted`.

        The row after `drafted[:i]` takes the history to be the committed output and those i tokens.
        """
        count = len(drafted) + 1 - first
        columns = {name: value.expand(count, 1) for name, value in self._columns.items()}
        bias = None if self._bias is None else self._bias.expand(count, -1)
        seen, counts = None, None
        if self._seen is not None or self._counts is not None:
            drafted_counts = self._drafted_counts(drafted, first)
            if self._seen is not None:
                seen = self._seen | (drafted_counts > 0)
            if self._counts is not None:
                counts = self._counts + drafted_counts
        return Rows(
            **columns,
            bias=bias,
            seen=seen,
            counts=counts,
            forbidden=self._forbidden_rows(drafted, first),
        )

    def tree_rows(self, drafted: Sequence[int], parents: Sequence[int]) -> Rows:
        """Those of a tree of drafted tokens: one for the root, then one for each token, as of the
        tokens that lead to it."""
        if is_chain(parents):
            return self.rows(drafted)
        ways = [path(parents, place) for place in range(len(drafted) + 1)]
        return self.rows_after([[drafted[place - 1] for place in way] for way in ways])

    def rows_after(self, ways: Sequence[Sequence[int]]) -> Rows:
        """A row as of each of several ways that the output may go on; at least one."""
        if self._is_memoryless:
            # However many rows: all are alike.
            return self.rows([0] * (len(ways) - 1))
        return join([self.rows(way, first=len(way)) for way in ways])

    @property
    def _is_memoryless(self) -> bool:
        """Whether all that is to come is processed alike, whatever comes before it."""
        return (
            self._seen is None
            and self._counts is None
            and self._grammar is None
            and self._num_output >= self._sampling.min_new_tokens
        )

    def commit(self, token_ids: Sequence[int]) -> None:
        """Adds tokens to the output.

        Raises:
            ValueError: the grammar does not allow them.
        """
        self._num_output += len(token_ids)
        if self._seen is not None:
            self._seen[list(token_ids)] = True
        if self._counts is not None:
            for token_id in token_ids:
                self._counts[token_id] += 1
        if self._grammar is not None:
            self._grammar.commit(token_ids)

    def _drafted_counts(self, drafted: Sequence[int], first: int) -> torch.Tensor:
        """float64 [rows, V]: how often each token occurs in the beginning that each row follows."""
        count = len(drafted) + 1 - first
        token_ids = torch.tensor([list(drafted)] * count, dtype=torch.int64, device=self._device)
        ends = torch.arange(first, len(drafted) + 1, device=self._device).unsqueeze(1)
        precedes = torch.arange(len(drafted), device=self._device) < ends
        zeros = torch.zeros(count, len(self._forbidden), dtype=torch.float64, device=self._device)
        return zeros.scatter_add_(1, token_ids, precedes.to(torch.float64))

    def _forbidden_rows(self, drafted: Sequence[int], first: int) -> torch.Tensor | None:
        """bool [rows, V], or None if nothing is forbidden."""
        count = len(drafted) + 1 - first
        too_early = self._sampling.min_new_tokens - self._num_output - first
        if not self._forbids_always and too_early <= 0 and self._grammar is None:
            return None
        forbidden = self._forbidden.repeat(count, 1)
        if too_early > 0:
            rows = torch.arange(min(too_early, count), device=self._device).unsqueeze(1)
            forbidden[rows, list(self._sampling.stop_token_ids)] = True
        if self._grammar is not None:
            forbidden |= ~self._grammar.allowed(drafted, first).to(self._device)
        return forbidden
