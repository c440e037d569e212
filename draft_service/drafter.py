"""What a source of drafts is: the interface that `--drafters` names implementations of.

An implementation is a class that is called with the service's settings. It is named by an entry
point of the group `specdec.drafters`:

    [project.entry-points."specdec.drafters"]
    mine = "my_package.drafts:MyDrafter"

and is used by `specdec draft --drafters mine`. What it proposes cannot change what the target
says, only how soon: any token of the vocabulary is safe to propose.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from draft_service.settings import DraftSettings
from specdec.sessions import ACCEPTANCE_RULES, PROTOCOL_VERSION
from specdec.v1 import common_pb2

_NO_LIMIT = 2**32 - 1


@dataclass(frozen=True)
class Draft:
    """The drafted tokens of one round."""

    token_ids: Sequence[int]
    """At most as many as were asked for. None at all is a good answer where nothing is likely."""
    distributions: Sequence[common_pb2.SparseDistribution] = ()
    """What each token was sampled from, where the session's rule needs it. Left empty the tokens
    count as certain, which is right for a drafter that does not sample."""
    parents: Sequence[int] = ()
    """If the tokens are a tree: of each the place of the token that it follows, counted from 1, or
    0 if it follows what is committed; see `specdec.trees`. A session that needs distributions, or
    has `draft_topk` 1, takes no trees."""
    probabilities: Sequence[float] = ()
    """If the drafter can tell: how probable it is that each token stands, with those before it."""
    match_length: int | None = None
    """How many of the last tokens occurred before what was copied here, by which drafters that
    match are preferred to others. None if the draft is not from a match."""
    timings: common_pb2.Timings | None = None
    """Where the time went. None if all of it was spent computing."""


class Prepared(NamedTuple):
    """A draft for a verdict that is not there yet."""

    token_ids: Sequence[int]
    """What the verdict commits, if it is as presumed."""
    draft: Draft
    """What would be proposed then."""


class DraftSession(ABC):
    """The drafts of one session."""

    def __init__(self, opened: common_pb2.Opened) -> None:
        self.opened = opened
        """The answer to the Open."""
        self.costs = common_pb2.DraftCosts()
        """What drafting costs in the round that is asked for. A drafter that can tell how probable
        its tokens are leaves out what is not worth it, where that is allowed."""

    @abstractmethod
    async def propose(self, committed: Sequence[int], num_draft_tokens: int) -> Draft:
        """Proposes what follows.

        Under REJECTION and BLOCK the tokens may depend on everything but the random numbers that
        decide about them, which are keyed by the session's seed and the tokens' positions.

        Args:
            committed: the tokens that were committed since the last call, or none; those of the
                Open are known already. The last proposal counts only as far as it is in here.
            num_draft_tokens: how many tokens to propose at most, at least 1.
        """

    async def prepare(self, count: int) -> Sequence[Prepared]:
        """Drafts what follows the likeliest verdicts on the last proposal, while it is verified.

        If one of them is given, the next call of `propose` has to return its draft, or the first
        tokens of it. A session that drafts in no time need not do anything.

        Args:
            count: for how many verdicts at most.
        """
        return ()

    def hurry(self) -> None:
        """Has a `prepare` that is under way end at once, with what there is."""
        return


class Drafter(ABC):
    """A source of drafts, shared by all sessions of a service."""

    any_tokenizer: ClassVar[bool] = True
    """Whether it only compares token ids, and so works with those of any tokenizer. One that does
    not overrides `info`, and can only be the last of several."""

    def __init__(self, settings: DraftSettings) -> None:
        self.settings = settings

    @property
    def info(self) -> common_pb2.ModelInfo:
        """What the handshake says. Asked for once it runs."""
        return common_pb2.ModelInfo(
            protocol_version=PROTOCOL_VERSION,
            vocab_size=_NO_LIMIT,
            effective_vocab_size=_NO_LIMIT,
            max_context_length=_NO_LIMIT,
            acceptance_rules=ACCEPTANCE_RULES,
            max_num_draft_tokens=self.settings.max_num_draft_tokens,
            any_tokenizer=True,
            certain_drafts=True,
        )

    @property
    def fault(self) -> str | None:
        """Why it cannot draft any more, so that the process is of no use, or None if it can."""
        return None

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Mapping[str, Any]]:
        """Loads what it needs, and has it while the block runs.

        Yields:
            What the log is to say of it.

        Raises:
            StartError: it cannot be had.
        """
        yield {}

    @abstractmethod
    def session(self, opening: common_pb2.Open) -> AbstractAsyncContextManager[DraftSession]:
        """A session for as long as the context is entered. The Open was checked against `info`.

        Raises:
            SpecdecError: on entering, if it cannot be served.
        """
