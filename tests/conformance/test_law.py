"""REJECTION and BLOCK are equal in law to plain decoding, with every processor on.

Real `Proposing` and `Verification` works with their histories, on tables of logits over 8 tokens.
The joint law of the first two tokens is enumerated with the obvious reference, and thousands of
draws are compared with it by chi-square. Seeds are fixed, so that an outcome never changes; planted
bugs show what the comparison sees.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from scipy import stats

from draft_service.drafting import Proposing
from specdec.lm.grammar import GrammarCompiler, GrammarState
from specdec.lm.history import History
from specdec.lm.processing import Rows, join
from specdec.lm.tokenizer import TokenizerData
from specdec.v1.common_pb2 import Sampling
from tests.conformance.capabilities import LAW_CASES, LAW_GRAMMARS
from tests.conformance.reference import scores_of
from tests.models import byte_tokens, make_tokenizer
from tests.processing import resolved
from tests.stack import RULES
from tests.tables import TableModel, release, session
from verifier_service.verification import Verification, Verified

VOCABULARY = 8
EOS = 0
PROMPT = [4, 2]
K = 3
DRAWS = 1000
HONEST, REJECTED = 1e-3, 1e-6
RULE = pytest.mark.parametrize("rule", ["rejection", "block"])

GENERATOR = torch.Generator().manual_seed(5)
TARGET = 1.2 * torch.randn(VOCABULARY, VOCABULARY, generator=GENERATOR)
"""Row s holds the logits of what follows token s."""
DRAFTS = {
    "near": TARGET + 0.6 * torch.randn(VOCABULARY, VOCABULARY, generator=GENERATOR),
    "stranger": 1.2 * torch.randn(VOCABULARY, VOCABULARY, generator=GENERATOR),
}


class CommittedOnly(History):
    """A planted bug: rows do not see the block's own earlier drafted tokens."""

    def rows(self, drafted: Sequence[int], first: int = 0) -> Rows:
        return join([super().rows([])] * (len(drafted) + 1 - first))


COMPILER = GrammarCompiler(
    TokenizerData.from_transformers(make_tokenizer(byte_tokens(VOCABULARY))).content,
    VOCABULARY,
    [EOS],
)


def start(sampling: Sampling) -> GrammarState | None:
    return COMPILER.start(sampling.grammar) if sampling.HasField("grammar") else None


def two_tokens(
    rule: str,
    draft: str,
    sampling: Sampling,
    k: int,
    on_target: type[History] = History,
    on_draft: type[History] = History,
    adapt: Callable[[int, Verified], int] = lambda k, verified: k,
) -> list[int]:
    """The first two tokens of one session. `adapt`: the next K, from the last one and a verdict."""
    value = RULES[rule]
    histories = [
        kind(sampling, PROMPT, VOCABULARY, torch.device("cpu"), start(sampling))
        for kind in (on_draft, on_target)
    ]
    at_draft, at_target = (session(PROMPT, history, sampling, value) for history in histories)
    draft_model, target = TableModel(DRAFTS[draft]), TableModel(TARGET)
    output: list[int] = []
    try:
        # A sparse q of 6 entries: truncated within the support of p.
        proposal = draft_model.run(Proposing(at_draft, k, 6))
        while True:
            base_length = len(PROMPT) + len(output)
            verified = target.run(
                Verification(at_target, proposal.token_ids, proposal.distributions)
            )
            output += verified.token_ids
            if sampling.HasField("grammar") and EOS in output:
                return [output[0], EOS if output[0] == EOS else output[1]]
            if len(output) >= 2:
                return output[:2]
            committed = (base_length, verified.token_ids)
            k = adapt(k, verified)
            proposal = draft_model.run(Proposing(at_draft, k, 6, committed))
    finally:
        release(at_draft, at_target)


def exact_law(sampling: Sampling, words: Sequence[Sequence[int]] = ()) -> torch.Tensor:
    """[V, V]: the probability of each beginning of two tokens.

    Args:
        sampling: resolved settings.
        words: the outputs that a grammar allows, if there is one. What ends after a token has all
            its probability at EOS.
    """

    def row(output: list[int]) -> torch.Tensor:
        last = output[-1] if output else PROMPT[-1]
        logits = TARGET[last].double()
        if words:
            longer = [word for word in words if list(word[: len(output)]) == output]
            allowed = {(*word, EOS)[len(output)] for word in longer}
            for token_id in set(range(VOCABULARY)) - allowed:
                logits[token_id] = -torch.inf
        return scores_of(logits, sampling, PROMPT, output).softmax(-1)

    first, law = row([]), torch.zeros(VOCABULARY, VOCABULARY, dtype=torch.float64)
    for token_id in range(VOCABULARY):
        if first[token_id] > 0.0:
            law[token_id] = first[token_id] * row([token_id])
    return law


def sample(
    rule: str, draft: str, sampling: Sampling, k: int, draws: int, **how: Any
) -> torch.Tensor:
    """[V, V]: how often each beginning came."""
    counts = torch.zeros(VOCABULARY, VOCABULARY, dtype=torch.float64)
    for seed in range(draws):
        settings = Sampling()
        settings.CopyFrom(sampling)
        settings.seed = seed
        output = two_tokens(rule, draft, settings, k, **how)
        counts[output[0], output[1]] += 1
    return counts


def p_value(counts: torch.Tensor, law: torch.Tensor) -> float:
    """Of the chi-square test; cells that expect fewer than 5 are pooled into one."""
    if bool((counts[law == 0.0] > 0).any()):
        return 0.0
    expected = law * counts.sum()
    often = expected >= 5.0
    observed = [*counts[often].tolist(), float(counts[~often].sum())]
    likely = [*expected[often].tolist(), float(expected[~often].sum())]
    if likely[-1] < 5.0:
        observed[-2:], likely[-2:] = [sum(observed[-2:])], [sum(likely[-2:])]
    return float(stats.chisquare(observed, likely, sum_check=False).pvalue)


@pytest.mark.slow
@RULE
@pytest.mark.parametrize(
    ("name", "draft"), [*((name, "near") for name in LAW_CASES), ("everything", "stranger")]
)
def test_the_law_is_that_of_plain_decoding(rule: str, draft: str, name: str) -> None:
    sampling = resolved(LAW_CASES[name])
    counts = sample(rule, draft, sampling, K, DRAWS)
    assert p_value(counts, exact_law(sampling)) > HONEST


@RULE
def test_the_law_with_everything_on_is_that_of_plain_decoding(rule: str) -> None:
    """A smaller sample, for every run of the quick tests."""
    sampling = resolved(LAW_CASES["everything"])
    counts = sample(rule, "near", sampling, K, 400)
    assert p_value(counts, exact_law(sampling)) > HONEST


def by_the_round_before(k: int, verified: Verified) -> int:
    """By what stood and what was emitted: all of that is committed."""
    grown = k + 1 if verified.num_accepted == k else verified.num_accepted
    return (grown + verified.token_ids[-1]) % 4


@pytest.mark.slow
@RULE
@pytest.mark.parametrize("k", [0, 1, 2])
def test_the_law_where_the_rounds_before_decide_how_much_is_drafted(rule: str, k: int) -> None:
    sampling = resolved(LAW_CASES["everything"])
    counts = sample(rule, "near", sampling, k, DRAWS, adapt=by_the_round_before)
    assert p_value(counts, exact_law(sampling)) > HONEST


@pytest.mark.slow
@pytest.mark.parametrize("name", LAW_CASES)
def test_the_law_of_plain_decoding_is_the_exact_one(name: str) -> None:
    sampling = resolved(LAW_CASES[name])
    counts = sample("rejection", "near", sampling, 0, DRAWS)
    assert p_value(counts, exact_law(sampling)) > HONEST


# Tokens 1 to 7 are ! " # $ % & '.
WORDS = {
    "regex": [(1,), (1, 2), (3, 3), (3, 1, 4)],
    "json_schema": [(2, 2), (2, 1, 2), (2, 3, 3, 2)],
    "ebnf": [(1,), (1, 2), (3, 3), (3, 1, 4)],
}


@pytest.mark.slow
@RULE
@pytest.mark.parametrize("kind", LAW_GRAMMARS)
def test_the_law_under_a_grammar(rule: str, kind: str) -> None:
    sampling = resolved(Sampling(temperature=1.2, grammar=LAW_GRAMMARS[kind], stop_token_ids=[EOS]))
    counts = sample(rule, "near", sampling, K, 500)
    law = exact_law(sampling, WORDS[kind])
    assert int((law > 0.0).sum()) == len(WORDS[kind])
    assert p_value(counts, law) > HONEST


@pytest.mark.slow
@RULE
@pytest.mark.parametrize("name", ["penalties", "rewards", "everything"])
def test_rows_that_see_committed_tokens_only_are_seen(rule: str, name: str) -> None:
    sampling = resolved(LAW_CASES[name])
    counts = sample(rule, "near", sampling, K, DRAWS, on_target=CommittedOnly)
    assert p_value(counts, exact_law(sampling)) < REJECTED


@pytest.mark.slow
@RULE
def test_a_mask_that_counts_committed_tokens_only_is_seen(rule: str) -> None:
    sampling = resolved(LAW_CASES["min_new_tokens"])
    counts = sample(rule, "near", sampling, K, DRAWS, on_target=CommittedOnly)
    assert p_value(counts, exact_law(sampling)) < REJECTED


@pytest.mark.slow
@RULE
def test_a_draft_with_that_bug_proposes_worse_and_changes_nothing(rule: str) -> None:
    """q is what was sampled from, whatever it ought to be."""
    sampling = resolved(LAW_CASES["penalties"])
    counts = sample(rule, "near", sampling, K, DRAWS, on_draft=CommittedOnly)
    assert p_value(counts, exact_law(sampling)) > HONEST
