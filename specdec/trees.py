"""Proposals that branch: trees of drafted tokens, given by the parent of each.

A token's parent is the place of the token that it follows, counted from 1; 0 is the root, which
stands for the committed tokens. Parents come before their children. Without parents each token
follows the one before it: a chain is a tree, too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence


def chain(count: int) -> list[int]:
    """The parents of a chain of so many tokens."""
    return list(range(count))


def parents_of(parents: Sequence[int], count: int) -> list[int]:
    """The parents of `count` tokens that came with these, or without any."""
    return list(parents) if parents else chain(count)


def is_chain(parents: Sequence[int]) -> bool:
    """Whether each token follows the one before it."""
    return all(parent == place for place, parent in enumerate(parents))


def parents_fault(parents: Sequence[int], token_ids: Sequence[int], topk: int) -> str | None:
    """What is wrong with the parents of drafted tokens; there may be none of them.

    Args:
        parents: of the tokens.
        token_ids: the tokens.
        topk: how many may have the same parent.
    """
    if not parents:
        return None
    if len(parents) != len(token_ids):
        return f"{len(token_ids)} drafted tokens came with {len(parents)} parents"
    for place, parent in enumerate(parents, 1):
        if parent >= place:
            return f"the parent of token {place} is {parent}, which does not come before it"
    if len(set(zip(parents, token_ids, strict=True))) != len(parents):
        return "two drafted tokens that follow the same one are equal"
    most = max(Counter(parents).values())
    if most > topk:
        return f"{most} drafted tokens follow the same one, the limit is {topk}"
    return None


def depths(parents: Sequence[int]) -> list[int]:
    """Of each token, how many tokens lead to it from the root, itself included."""
    found = [0]
    for parent in parents:
        found.append(found[parent] + 1)
    return found[1:]


def path(parents: Sequence[int], place: int) -> list[int]:
    """The places of the tokens from the root to the one at `place`, which comes last."""
    found = []
    while place:
        found.append(place)
        place = parents[place - 1]
    return found[::-1]


def walk(parents: Sequence[int], token_ids: Sequence[int], followed: Sequence[int]) -> list[int]:
    """The places that tokens lead through, from the root on, as long as they are in the tree."""
    places = {key: place for place, key in enumerate(zip(parents, token_ids, strict=True), 1)}
    found: list[int] = []
    for token_id in followed:
        place = places.get((found[-1] if found else 0, token_id))
        if place is None:
            break
        found.append(place)
    return found
