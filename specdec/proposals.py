"""What is wrong with drafted tokens, if anything: checked by whoever is about to rely on them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from specdec.v1 import common_pb2, draft_pb2


def needs_distributions(
    sampling: common_pb2.Sampling, rule: common_pb2.AcceptanceRule.ValueType
) -> bool:
    """Whether drafted tokens must come with the distribution that they were sampled from."""
    return sampling.temperature > 0.0 and rule in (
        common_pb2.ACCEPTANCE_RULE_REJECTION,
        common_pb2.ACCEPTANCE_RULE_BLOCK,
    )


def draft_topk(opening: common_pb2.Open) -> int:
    """How many tokens a proposal of the session may hold after one and the same token."""
    if needs_distributions(opening.sampling, opening.acceptance_rule):
        return 1
    return max(opening.draft_topk, 1)


def first_tokens(proposal: draft_pb2.Proposal, count: int) -> draft_pb2.Proposal:
    """The proposal, cut down to so many tokens if it has more."""
    if len(proposal.token_ids) <= count:
        return proposal
    cut = draft_pb2.Proposal()
    cut.CopyFrom(proposal)
    for field in (cut.token_ids, cut.distributions, cut.parents, cut.probabilities):
        del field[count:]
    return cut


def num_draft_tokens_fault(num_draft_tokens: int, limit: int) -> str | None:
    """What is wrong with the number of drafted tokens."""
    if num_draft_tokens > limit:
        return f"{num_draft_tokens} drafted tokens are more than the limit of {limit}"
    return None


def token_ids_fault(token_ids: Sequence[int], effective_vocab_size: int) -> str | None:
    """What is wrong with token ids: the first that is outside the effective vocabulary."""
    bad = next((t for t in token_ids if t >= effective_vocab_size), None)
    if bad is None:
        return None
    return f"token id {bad} is outside the vocabulary of {effective_vocab_size}"


def distributions_fault(
    token_ids: Sequence[int],
    distributions: Sequence[common_pb2.SparseDistribution],
    effective_vocab_size: int,
) -> str | None:
    """What is wrong with the sparse distributions that drafted tokens were sampled from."""
    if len(distributions) != len(token_ids):
        return f"{len(token_ids)} drafted tokens came with {len(distributions)} distributions"
    for position, (token_id, q) in enumerate(zip(token_ids, distributions, strict=True)):
        ids = set(q.token_ids)
        where = f"the distribution at position {position}"
        if len(ids) != len(q.token_ids) or len(ids) != len(q.probabilities):
            return f"{where} needs distinct token ids, each with its probability"
        if not all(math.isfinite(x) and x > 0.0 for x in q.probabilities):
            return f"{where} has a probability that is not positive and finite"
        if token_id not in ids:
            return f"{where} does not hold token id {token_id}, which was sampled from it"
        fault = token_ids_fault(q.token_ids, effective_vocab_size)
        if fault is not None:
            return f"{where}: {fault}"
    return None
