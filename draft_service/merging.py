"""Two drafts as one tree."""

from __future__ import annotations

from collections import Counter

from draft_service.drafter import Draft
from specdec.trees import is_chain, parents_of

Way = tuple[int, ...]
"""The tokens from the committed ones to a drafted one, which comes last."""


def merge(first: Draft, second: Draft, num_draft_tokens: int, topk: int) -> Draft:
    """The most probable tokens of both drafts.

    Where both have a token it is as probable as the surer one of them says.

    Args:
        first: with probabilities, of a session that takes trees. Its timings are kept.
        second: likewise, in no time.
        num_draft_tokens: how many tokens to keep at most.
        topk: how many of them may follow the same one.
    """
    chances: dict[Way, float] = {}
    for draft in (first, second):
        for way, probability in zip(_ways(draft), draft.probabilities, strict=True):
            chances[way] = max(probability, chances.get(way, 0.0))
    # No token is more probable than the one before it, so that none is taken without that one.
    likeliest = sorted(chances, key=lambda way: (-chances[way], len(way)))
    places: dict[Way, int] = {(): 0}
    parents: list[int] = []
    children: Counter[Way] = Counter()
    for way in likeliest:
        before = way[:-1]
        if len(parents) < num_draft_tokens and before in places and children[before] < topk:
            children[before] += 1
            parents.append(places[before])
            places[way] = len(parents)
    kept = [way for way in places if way]
    return Draft(
        token_ids=[way[-1] for way in kept],
        parents=[] if is_chain(parents) else parents,
        probabilities=[chances[way] for way in kept],
        timings=first.timings,
    )


def _ways(draft: Draft) -> list[Way]:
    """Of each token of a draft."""
    found: list[Way] = [()]
    for token_id, parent in zip(
        draft.token_ids, parents_of(draft.parents, len(draft.token_ids)), strict=True
    ):
        found.append((*found[parent], token_id))
    return found[1:]
