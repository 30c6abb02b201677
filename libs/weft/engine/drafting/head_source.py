"""Decides for each step which sequences the draft model drafts for, by what that costs and how much is accepted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Items
from math import ceil
from typing import NamedTuple

from weft.engine.drafting.acceptance import NUM_JUDGED_OF_HEAD, AcceptanceRates, SourceRecord
from weft.engine.drafting.costs import HYSTERESIS, MAX_OUTLIER, StepCosts
from weft.engine.drafting.drafter import DraftHead, DraftRequest, DraftSource, DraftToken, Proposal
from weft.engine.drafting.graph_rows import GraphRows
from weft.engine.drafting.sequence_drafter import SequenceDrafter
from weft.engine.sequence import Sequence

# Averages move by this share of the difference.
WEIGHT = 0.1
# Share of a step that a draft is taken to cost before it was measured, and what drafts are taken to bring.
PRIOR_SHARE = 0.1
PRIOR_DRAFTS, PRIOR_TOKENS = 3.0, 1.5
# Drafts of a sequence in a step that learns what a pass takes, or whether the model pays now.
NUM_PROBED = 3
# A drafted token is this likely to be followed by another right one, if all before it are right.
NEXT_RATE = 0.9

Drafters = Mapping[Sequence, SequenceDrafter]


class HeadBudget(NamedTuple):
    """Seconds that a probe of the draft model may take, and seconds that any of its proposals may lose in one step."""

    probe_seconds: float
    loss_seconds: float


class HeadSource:
    """Asks the draft model.

    - `costs_of`: seconds that drafting for the next step took, by sequence.
    - `is_paying`: drafts for all sequences that may have some were expected to save time in the last step.
    """

    def __init__(
        self,
        head: DraftHead,
        costs: StepCosts,
        rates: AcceptanceRates,
        clock: Callable[[], float],
        graph_rows: GraphRows | None = None,
    ) -> None:
        """`graph_rows`: steps and passes are graphs. The first drafts of a number of sequences may capture theirs."""
        self._graph_rows = graph_rows
        self._numbers_run: set[int] = set()
        self._first_seconds = 0.0
        self.costs_of: dict[Sequence, float] = {}
        self.is_paying = True
        self._head, self._costs, self._rates, self._clock = head, costs, rates, clock
        self._num_drafts, self._num_tokens = PRIOR_DRAFTS, PRIOR_TOKENS
        self._pass_seconds: dict[int, float] = {}  # of one draft for each sequence, by the number of sequences

    def improve(
        self, requests: Items[DraftRequest], proposals: Items[Proposal], drafters: Drafters, budget: HeadBudget
    ) -> tuple[list[Proposal], float]:
        """Replace proposals of which fewer tokens are expected than of the draft model's.

        `drafters`: of each sequence with a limit. A model that is not expected to pay is asked for a few drafts, as a
        probe within the budget. Returns the proposals, and the seconds of such a probe, or 0. All drafts of a probe
        should be verified.
        """
        self.costs_of.clear()
        context = sum(len(sequence.token_ids) for sequence, _ in requests)
        likely = [index for index, request in enumerate(requests) if _may_ask(request, drafters)]
        plain = self._costs.plain_seconds(len(requests), context)
        improved = list(proposals)
        if not plain:
            return improved, 0.0
        expected = self._expected_tokens(len(likely), len(requests), context, plain) if likely else 0.0
        self.is_paying = expected > 0
        asked = [index for index in likely if not requests[index].sequence.is_bare]
        if not asked:
            return improved, 0.0
        known = {index: self._tokens(proposals[index], drafters[requests[index].sequence]) for index in asked}
        if len(asked) < len(likely):
            expected = self._expected_tokens(len(asked), len(requests), context, plain)
        spent = 0.0
        if expected:
            asked = [index for index in asked if known[index] < expected]
        elif not any(proposals):
            spent = self._probe_seconds(len(asked), context, plain)
        if not asked or (not expected and not 0 < spent <= budget.probe_seconds):
            return improved, 0.0
        most = self._affordable(len(asked), context, plain, budget)
        if not most:
            return improved, 0.0
        most = min(most, NUM_PROBED) if spent else most
        chosen = [requests[index]._replace(limit=min(requests[index].limit, most)) for index in asked]
        found = self._draft(chosen, drafters, 0.0 if spent else len(requests) / plain)
        for index, drafts in zip(asked, found, strict=True):
            if spent or self._tokens(drafts, drafters[requests[index].sequence]) > known[index]:
                improved[index] = drafts
        return improved, spent

    def take_first_seconds(self) -> float:
        """Return the seconds of drafts that may have captured graphs, since the last call."""
        seconds, self._first_seconds = self._first_seconds, 0.0
        return seconds

    def judge(self, sequence: Sequence, record: SourceRecord, num_drafts: int, num_accepted: int, saved: float) -> None:
        """Learn from the last proposal for a sequence. `saved`: seconds, without the time that drafting took."""
        num_tokens = len(sequence.token_ids)
        record.judge(saved - self.costs_of.get(sequence, 0.0), num_drafts, num_tokens, NUM_JUDGED_OF_HEAD)
        record.judge_proposal(num_accepted, num_tokens)

    def forget(self, sequence: Sequence) -> None:
        """Drop all state of a sequence that has ended."""
        self._head.forget(sequence)

    def _tokens(self, proposal: Proposal, drafter: SequenceDrafter) -> float:
        """Return how many drafts are expected to be accepted."""
        return sum(self._rates.survival(proposal, drafter.records))

    def _expected_tokens(self, num_asked: int, num_sequences: int, context: int, plain: float) -> float:
        """Return the accepted drafts that a sequence can expect; 0 if they do not pay."""
        rows = self._num_rows(num_asked, num_sequences)
        curve = self._costs.curve(num_sequences, rows)
        seconds = plain + curve[rows] - curve[0] + rows * context / num_sequences * self._costs.draft_context_seconds
        seconds += self._num_drafts * self._pass_of(num_asked, plain)
        rate = (num_sequences + num_asked * self._num_tokens) / seconds
        return self._num_tokens if rate > num_sequences / plain * (1 + HYSTERESIS) else 0.0

    def _num_rows(self, num_asked: int, num_sequences: int) -> int:
        """Return the further rows of a step in which as many sequences have the drafts that they usually get."""
        counts = self._graph_rows.draft_counts(num_sequences, ceil(self._num_drafts)) if self._graph_rows else []
        return num_sequences * counts[-1] if counts else round(num_asked * self._num_drafts)

    def _probe_seconds(self, num_asked: int, context: int, plain: float) -> float:
        return NUM_PROBED * self._draft_seconds(num_asked, context, plain)

    def _affordable(self, num_asked: int, context: int, plain: float, budget: HeadBudget) -> int:
        """Return the drafts of each sequence that may all be wrong. A pass that was never measured may take long."""
        most = max(0, int(budget.loss_seconds / max(1e-9, self._draft_seconds(num_asked, context, plain))))
        return most if num_asked in self._pass_seconds else min(most, NUM_PROBED)

    def _draft_seconds(self, num_asked: int, context: int, plain: float) -> float:
        """Return what one more draft of each sequence takes, with its verification."""
        return self._pass_of(num_asked, plain) + num_asked * self._row_seconds(num_asked, context)

    def _draft(self, requests: list[DraftRequest], drafters: Drafters, rate: float) -> list[Proposal]:
        """Draft, as long as one more draft saves more than it takes.

        `rate`: tokens a second without drafts; 0 drafts up to the limits.
        """
        context = sum(len(sequence.token_ids) for sequence, _ in requests)
        least = rate * (self._row_seconds(len(requests), context) + self._pass_of(len(requests), 0.0) / len(requests))

        def goes_on(sequence: Sequence, drafts: Items[DraftToken]) -> bool:
            return self._rates.survival(drafts, drafters[sequence].records)[-1] * NEXT_RATE > least

        started_at = self._clock()
        proposals = self._head.draft(requests, goes_on)
        seconds = self._clock() - started_at
        if self._graph_rows is not None and len(requests) not in self._numbers_run:
            self._numbers_run.add(len(requests))
            self._first_seconds, seconds = seconds, 0.0
        else:
            self._measure(proposals, seconds)
        self.costs_of = {sequence: seconds / len(requests) for sequence, _ in requests}
        return [self._fit(*each, drafters) for each in zip(requests, proposals, strict=True)]

    def _measure(self, proposals: Items[Proposal], seconds: float) -> None:
        longest, num_asked = max(map(len, proposals), default=0), len(proposals)
        if longest:
            known = self._pass_seconds.get(num_asked, seconds / longest)
            self._pass_seconds[num_asked] = known + WEIGHT * (min(seconds / longest, MAX_OUTLIER * known) - known)

    def _fit(self, request: DraftRequest, drafts: Proposal, drafters: Drafters) -> Proposal:
        """Return the drafts that can be verified, and learn what all of them bring."""
        if not drafts:
            return ()
        sequence, limit = request
        drafter, weight = drafters[sequence], WEIGHT / len(self.costs_of)
        fitting = drafter.fit(drafts, limit)
        self._num_drafts += weight * (len(drafts) - self._num_drafts)
        self._num_tokens += weight * (self._tokens(fitting, drafter) - self._num_tokens)
        if not fitting:  # no step shows that these drafts cost time and bring nothing
            record = drafter.records.setdefault(DraftSource.HEAD, SourceRecord())
            self.judge(sequence, record, len(drafts), 0, 0.0)
        return fitting

    def _pass_of(self, num_asked: int, plain: float) -> float:
        return self._pass_seconds.get(num_asked, PRIOR_SHARE * plain)

    def _row_seconds(self, num_asked: int, context: int) -> float:
        """Return what the verification of one more draft of one sequence costs."""
        curve = self._costs.curve(num_asked, num_asked)
        return (curve[num_asked] - curve[0]) / num_asked + context / num_asked * self._costs.draft_context_seconds


def _may_ask(request: DraftRequest, drafters: Drafters) -> bool:
    sequence, limit = request
    if limit <= 0:
        return False
    record = drafters[sequence].records.get(DraftSource.HEAD)
    return record is None or not record.is_shut(len(sequence.token_ids))
