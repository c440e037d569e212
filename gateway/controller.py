"""How much to draft, decided round by round from what earlier rounds brought and cost.

Exactness. Under REJECTION and BLOCK the number of drafted tokens may depend on anything but the
tokens that it is about: a round that is cut short because of what was drafted in it would favour
some outputs over others. So a plan is made before its proposal exists, from `Observation`s of
rounds that are committed: they hold counts and times, and no tokens. What a draft may leave out on
its own, having seen the tokens, is ruled by `row_cost` and `step_cost`, and these are 0 unless the
controller is `confident`. It is to be so only where distributions are not needed: at temperature 0
and under COUPLED.

The objective is the tokens per second of all sessions that share the verifier's passes: a row that
one of them adds is waited for by all.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from gateway.acceptance import Acceptance, rounded
from gateway.outlook import Outlook
from gateway.pass_cost import usable
from gateway.workload import Observation, Workload

_MOST = 32
"""The most drafted tokens that are thought about."""
_FIRST_PROBE = 4
_LAST_PROBE = 64
"""Undrafted rounds before a probe: the first time, and at most where probes are cheap."""
_RAREST_PROBE = 512.0
"""The same where they are dear, since many sessions wait for each."""
_PROBE_TOKENS = 1
"""One row more than a plain round: it tells whether the first token stands."""
_PROBING_SHARE = 0.03
"""The most that probes may cost, before they become fewer: of what all sessions commit."""
_QUICK = 0.5
"""How far a session's view of its passes moves at each: load may change from one to the next."""
NO_STEP = 1.0
"""A cost at which no step pays: it cannot give more than a token."""
_STEP_GUESS = 0.1
"""A step of the draft in passes of the verifier, before one was measured."""
_MOST_SESSIONS = 1e5
_LEAST_US = 1e-3
"""No time is shorter, so that rates are finite."""


class DraftPlan(NamedTuple):
    """What to ask the draft for in the next round."""

    num_draft_tokens: int
    row_cost: float = 0.0
    """Of one more row, in tokens: `DraftCosts.row`. 0 unless the controller is confident."""
    step_cost: float = 0.0
    """Of one more step of the draft, in tokens: `DraftCosts.step`."""
    probing: bool = False
    """Whether it does not pay as far as is known, and is drafted to learn better."""


class Controller:
    """Decides how much one session drafts."""

    def __init__(self, workload: Workload, *, confident: bool) -> None:
        """
        Args:
            workload: what it shares with the other sessions.
            confident: whether the draft may leave out tokens by how likely they are to stand.
        """
        self._workload = workload
        self._confident = confident
        self._acceptance = Acceptance(workload.acceptance)
        self._sessions = workload.sessions
        self._begun = False
        """Whether it has seen a pass."""
        self._unplanned_rows = 0.0
        """Of others in a pass, beyond what the workload's plans account for."""
        self._queueing = 0.0
        """How long a round waits for passes that it is not in, in passes."""
        self._survivals: list[float] = []
        self._miss_rate = 1.0
        """How often a proposal had to be waited for."""
        self._rows: float | None = None
        """A proposal's, if the draft is free to leave some out."""
        self._width = 1.0
        """How many tokens a proposal has at each depth."""
        self._plan = DraftPlan(0)
        self._others_drafted = 0.0
        """What the others were thought to draft when the plan was made."""
        self._plain_rounds = 0
        """Since the last one with a proposal, or a probe."""
        self._patience = _FIRST_PROBE
        self._reason = ""

    def plan(self, limit: int) -> DraftPlan:
        """What to ask for in the next round: at most `limit` tokens.

        To be called once for each round, before its proposal is known.
        """
        self._survivals = self._acceptance.survivals(_MOST)
        if not self._begun:
            self._sessions = max(self._sessions, 1.0 + len(self._workload.planned - {self}))
        self._workload.planned.add(self)
        outlook = self._outlook()
        self._others_drafted = self._workload.drafted
        best = self._best(min(limit, _MOST), outlook)
        if best > 0:
            self._plan = self._drafting(limit, best, outlook)
            self._plain_rounds, self._patience = 0, _FIRST_PROBE
        elif limit > 0 and self._plain_rounds >= self._probe_after(outlook):
            self._plan = DraftPlan(min(limit, _PROBE_TOKENS), probing=True)
            self._plain_rounds = 0
        else:
            self._plan = DraftPlan(0)
            self._plain_rounds += limit > 0
        rows = float(self._plan.num_draft_tokens)
        if self._confident and self._rows is not None:
            rows = min(rows, self._rows)
        self._workload.add_plan(rows, self._survivals, max(self._sessions, 1.0))
        return self._plan

    def free(self, limit: int) -> DraftPlan:
        """What to ask for where drafting does not pay: what the draft has at no cost, if anything.

        Only for a controller that is confident. A round like that is observed without its tokens.
        """
        plan = self._drafting(limit, 0, self._outlook())
        return plan._replace(num_draft_tokens=limit, step_cost=NO_STEP)

    def observe(self, observation: Observation) -> None:
        """Learns from the round that was planned last, once it is committed."""
        depths = [min(max(count, 0), _MOST) for count in observation.depths[:_MOST]]
        rows = sum(depths)
        num_accepted = min(max(observation.num_accepted, 0), len(depths))
        self._begun = True
        self._workload.planned.discard(self)
        self._observe_pass(observation, rows)
        if self._plan.num_draft_tokens > 0 or depths:
            cut_short = self._confident and rows < self._plan.num_draft_tokens
            self._acceptance.add(
                len(depths), num_accepted, observation.expected, cut_short=cut_short
            )
            self._observe_draft(observation, max(len(depths), 1))
        if self._plan.probing:
            # One that stands is followed up soon, also if it takes more of them to be convinced.
            longer = min(2 * self._patience, _LAST_PROBE)
            self._patience = _FIRST_PROBE if num_accepted else longer
        elif self._plan.num_draft_tokens > 0:
            self._rows = rows if self._rows is None else self._rows + 0.3 * (rows - self._rows)
            if depths:
                self._width += 0.3 * (rows / len(depths) - self._width)
        share = 1.0 / max(self._sessions, 1.0)
        self._workload.tokens.add(1.0 + num_accepted, share)

    @property
    def beliefs(self) -> dict[str, object]:
        """What it goes by, for a log."""
        outlook, workload = self._outlook(), self._workload
        return {
            "acceptance": rounded(self._acceptance.means(8)),
            "offered": round(self._acceptance.offered, 2),
            "useless": round(self._acceptance.uselessness, 2),
            "calibration": round(self._acceptance.calibration, 2),
            "pass_us": [(round(x, 1), round(y)) for x, y in workload.verify.points],
            "step_us": round(outlook.step_us),
            "wire_us": [round(workload.draft_wire.value), round(workload.verify_wire.value)],
            "sessions": round(self._sessions, 1),
            "other_rows": round(outlook.other_rows, 1),
            "miss_rate": round(self._miss_rate, 2),
            "probe_after": self._patience,
            "why_plain": self._reason,
        }

    def _outlook(self) -> Outlook:
        workload, sessions = self._workload, max(self._sessions, 1.0)
        others = sessions - 1.0
        step_us = workload.step(sessions) or _STEP_GUESS * workload.verify(1.0)
        wire = workload.draft_wire if workload.draft_wire.known else workload.verify_wire
        # What few sessions drafted says nothing of many that have just come.
        drafted = min(others, workload.sessions) * workload.drafted
        outlook = Outlook(
            crowd=sessions * (1.0 + self._queueing) - 1.0,
            other_rows=max(others, others + drafted + self._unplanned_rows),
            wire_us=workload.verify_wire.value,
            first_us=wire.value * self._miss_rate,
            step_us=step_us * self._miss_rate,
        )
        window_us = outlook.draft_us(self._common(sessions, outlook)) * min(others, 1.0)
        return outlook._replace(window_us=window_us)

    def _common(self, sessions: float, outlook: Outlook) -> int:
        """The number of drafted tokens that would be best if it were the same for all sessions.

        A pass waits for the sessions that are about to join it. So the first that drafts keeps all
        the others waiting, which never pays for one alone; if many do, it costs no more.
        """
        verify = self._workload.verify
        best, best_rate, tokens = 0, 0.0, 1.0
        for count, survival in enumerate([0.0, *self._workload.survivals]):
            tokens += survival
            rows = sessions * (1.0 + count)
            time_us = outlook.wire_us + outlook.draft_us(count) + verify(rows)
            rate = tokens / max(time_us, _LEAST_US)
            if rate > best_rate:
                best, best_rate = count, rate
        return best

    def _best(self, limit: int, outlook: Outlook) -> int:
        """The number of drafted tokens with the highest rate of all sessions together."""
        if limit <= 0:
            return 0
        if not self._workload.verify.known:
            # The first round of all: without it no other could be told to be worth its time.
            self._reason = "nothing was measured yet"
            return 0
        offered = self._acceptance.offered
        tokens = 1.0
        plain = best_rate = self._rate(0.0, tokens, 0, outlook)
        best, highest = 0, 0.0
        for count, survival in enumerate(self._survivals[:limit], 1):
            tokens += survival
            rows = offered * count
            if self._confident and self._rows is not None:
                rows = min(rows, self._rows)
            rate = self._rate(rows, tokens, count, outlook)
            highest = max(highest, rate)
            if rate > best_rate:
                best, best_rate = count, rate
        if best == 0:
            with_draft, without = 1e6 * highest, 1e6 * plain
            self._reason = f"{with_draft:.1f} tokens/s of all with a draft, {without:.1f} without"
        return best

    def _rate(self, rows: float, tokens: float, steps: float, outlook: Outlook) -> float:
        """Tokens per µs of this session and all others, if it drafts so many rows."""
        pass_us = self._workload.verify(outlook.other_rows + 1.0 + rows)
        wait_us = max(outlook.window_us, outlook.draft_us(steps))
        tokens += outlook.crowd * max(self._workload.tokens.value, 1.0)
        return tokens / max(outlook.wire_us + wait_us + pass_us, _LEAST_US)

    def _probe_after(self, outlook: Outlook) -> float:
        """So many plain rounds that probes, if all sessions make them, cost little."""
        plain = self._rate(0.0, 1.0, 0, outlook)
        probing = self._rate(_PROBE_TOKENS, 1.0, _PROBE_TOKENS, outlook)
        cost = (1.0 - probing / plain) * (1.0 + outlook.crowd) if plain > 0.0 else 0.0
        return max(self._patience, min(cost / _PROBING_SHARE, _RAREST_PROBE))

    def _drafting(self, limit: int, best: int, outlook: Outlook) -> DraftPlan:
        if not self._confident:
            return DraftPlan(best)
        rows = best if self._rows is None else self._rows
        tokens = 1.0 + sum(self._survivals[:best])
        rate = self._rate(rows, tokens, best, outlook)
        row_us = self._workload.verify.slope(outlook.other_rows + 1.0 + rows)
        own = rate * tokens / (tokens + outlook.crowd * max(self._workload.tokens.value, 1.0))
        calibration = self._acceptance.calibration
        # Alone it may go as deep as is worth its time. Among others a step costs nothing as long as
        # they draft, too, and much beyond: a pass waits for the deepest of all proposals.
        alone = min(max(2.0 - self._sessions, 0.0), 1.0)
        cap = limit if alone > 0.5 else min(limit, math.ceil(best * self._width))
        return DraftPlan(
            cap,
            row_cost=usable(rate * row_us / calibration),
            step_cost=usable(alone * own * outlook.step_us / calibration),
        )

    def _observe_pass(self, observation: Observation, rows: int) -> None:
        workload = self._workload
        sessions = min(max(observation.pass_sessions, 1), _MOST_SESSIONS)
        pass_rows = max(usable(observation.pass_rows), sessions + rows)
        verify_us = usable(observation.verify_us)
        workload.sessions = sessions
        self._sessions += _QUICK * (sessions - self._sessions)
        # Each of the pass's sessions reports it.
        workload.verify.add(pass_rows, verify_us, 1.0 / sessions)
        workload.verify_wire.add(observation.verify_wire_us)
        planned = (sessions - 1.0) * (1.0 + self._others_drafted)
        surprise = pass_rows - 1.0 - rows - planned - self._unplanned_rows
        # A pass with the prompt of another session is no sign of what the next will be like.
        bound = 2.0 + planned / 4.0
        self._unplanned_rows += 0.3 * min(max(surprise, -bound), bound)
        queue_us = usable(observation.verify_queue_us)
        # A pass waits up to half of one for those who are about to join it, which says nothing.
        missed = queue_us / max(verify_us, _LEAST_US) if queue_us > verify_us / 2.0 else 0.0
        self._queueing += 0.2 * (min(missed, 4.0) - self._queueing)

    def _observe_draft(self, observation: Observation, steps: int) -> None:
        workload = self._workload
        step_us = usable(observation.draft_us) / steps
        workload.step.add(max(self._sessions, 1.0), step_us, 1.0 / max(self._sessions, 1.0))
        self._miss_rate += 0.1 * ((not observation.hidden) - self._miss_rate)
        if not observation.hidden:
            workload.draft_wire.add(observation.draft_wire_us)
