"""Chooses by measured time how many drafts each step verifies, and counts what became of them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Items

from weft.engine.drafting.acceptance import AcceptanceRates, SourceRecord
from weft.engine.drafting.costs import HYSTERESIS, MAX_OUTLIER, DraftOrder, StepCosts
from weft.engine.drafting.draft_stats import DraftStats, OffReason, SourceStats
from weft.engine.drafting.drafter import DecodeStep, DraftHead, DraftOutcome, DraftRequest, DraftSource, Proposal
from weft.engine.drafting.graph_rows import EvenDrafts, GraphRows
from weft.engine.drafting.head_source import HeadBudget, HeadSource
from weft.engine.drafting.head_use import HeadUse
from weft.engine.drafting.ledger import LossLedger
from weft.engine.drafting.sequence_drafter import SequenceDrafter
from weft.engine.sequence import Sequence

# Prompt tokens indexed before a step, for all sequences together; takes about 1 ms.
MAX_INDEXED = 8192
# Of the steps that could have drafts, every 128th has none: it measures T0.
SAMPLE_STEPS = 128
# Of steps with drafts, every 16th has a number of drafts that was not measured, if there is one below the chosen.
VARY_STEPS = 16
# Steps without drafts that must be measured before a step with as many sequences has drafts.
MIN_SAMPLES = 2
# Share of the time in which drafts are verified that are not expected to pay, to learn whether they do.
PROBE_SHARE = 0.005
MAX_PROBE_SECONDS = 1.0
# A probe counts for at least this share of a step without drafts.
MIN_PROBE = 0.02


class _SourceCounts:
    """Growing counts of one source, by the place of a draft in its step."""

    __slots__ = ("accepted", "num_proposals", "verified")

    def __init__(self) -> None:
        self.num_proposals = 0
        self.verified: list[int] = []
        self.accepted: list[int] = []

    def add(self, place: int, is_accepted: bool) -> None:
        while len(self.verified) <= place:
            self.verified.append(0)
            self.accepted.append(0)
        self.verified[place] += 1
        self.accepted[place] += is_accepted


class AdaptiveSpeculator:
    """Drafts by grammar, prediction, copy and a draft model; implements `weft.engine.drafting.drafter.Speculator`.

    The time to find drafts is part of what speculation costs. `stats` may be called on any thread.
    """

    def __init__(
        self,
        eos_token_ids: tuple[int, ...],
        clock: Callable[[], float] = time.perf_counter,
        follows_grammars: bool = True,
        graph_rows: GraphRows | None = None,
    ) -> None:
        """`follows_grammars`: also draft the tokens that a grammar forces. `graph_rows`: of steps that are graphs."""
        self._clock = clock
        self._follows_grammars = follows_grammars
        self._graph_rows = graph_rows
        self._sizes_run: set[tuple[int, int]] = set()  # sequences and rows of the steps that were graphs
        self._propose_seconds = 0.0  # since the last finished step
        self._eos_token_ids = eos_token_ids
        self._drafters: dict[Sequence, SequenceDrafter] = {}
        self._rates = AcceptanceRates()
        self._costs = StepCosts(shares_context=graph_rows is not None)
        self._ledger = LossLedger()
        self._head: HeadSource | None = None
        self._head_use = HeadUse()
        self._num_since_sample = 0
        self._probe_seconds = 0.0
        self._reason: OffReason | None = None  # why the step that was planned last has no drafts
        self._sources: dict[DraftSource, _SourceCounts] = {}
        self._tokens_per_step: Counter[int] = Counter()
        self._off_seconds: dict[OffReason, float] = {}

    def propose(self, requests: Items[DraftRequest], num_prompt_rows: int) -> list[Proposal]:
        """Return the drafts to verify in the next step."""
        started_at = self._clock()
        drafts = self._propose(requests, num_prompt_rows)
        self._propose_seconds += self._clock() - started_at
        if self._head is not None:
            self._propose_seconds -= self._head.take_first_seconds()
        return drafts

    def set_head(self, head: DraftHead) -> None:
        """Also draft with a draft model."""
        self._head = HeadSource(head, self._costs, self._rates, self._clock, self._graph_rows)

    def fills_draft_layer(self, sequence: Sequence) -> bool:
        """Return False while drafts of the draft model do not pay, but for a sample of the sequences."""
        return self._head_use.fills(sequence)

    def _propose(self, requests: Items[DraftRequest], num_prompt_rows: int) -> list[Proposal]:
        self._reason = OffReason.LOSS if self._ledger.is_off else None
        if self._head is not None and (self._ledger.is_off or num_prompt_rows):
            self._head.is_paying = False
        proposals: list[Proposal] = [] if self._ledger.is_off else self._gather(requests)
        if proposals and self._head is not None and not num_prompt_rows and not self._is_sample_due(len(requests)):
            budget = HeadBudget(self._probe_seconds, self._ledger.spare_seconds)
            proposals, spent = self._head.improve(requests, proposals, self._drafters, budget)
            self._probe_seconds -= spent
            if spent:
                return proposals
        if not any(proposals):
            return [()] * len(requests)
        counts = self._choose(requests, proposals, num_prompt_rows)
        if counts is None or not any(counts):
            self._reason = OffReason.SAMPLE if counts is None else OffReason.COST
            return [()] * len(requests)
        return [proposal[:count] for proposal, count in zip(proposals, counts, strict=True)]

    def _is_sample_due(self, num_sequences: int) -> bool:
        """Return True if the next step should measure steps without drafts."""
        return self._costs.num_measured(num_sequences) < MIN_SAMPLES or self._num_since_sample >= SAMPLE_STEPS

    def on_step(self, step: DecodeStep) -> None:
        """Learn what the step cost and which drafts were accepted."""
        step, is_typical = self._as_computed(step)
        num_sequences = len(step.outcomes)
        self._probe_seconds = min(MAX_PROBE_SECONDS, self._probe_seconds + PROBE_SHARE * step.seconds)
        if self._head is not None:
            self._head_use.on_step(self._head.is_paying)
        if step.num_rows > num_sequences:
            self._follow(step, MAX_OUTLIER if is_typical else 1.0)
        else:
            self._ledger.add(step.seconds, self._propose_seconds)
            self._tokens_per_step[1] += num_sequences
            if not step.num_prompt_rows:
                self._num_since_sample = 0
            if self._reason is not None:
                self._off_seconds[self._reason] = self._off_seconds.get(self._reason, 0.0) + step.seconds
        self._reason = None
        self._propose_seconds = 0.0
        if is_typical:
            self._costs.measure(step)

    def _as_computed(self, step: DecodeStep) -> tuple[DecodeStep, bool]:
        """Return the step with the padding of its graph, and whether its duration is that of later ones.

        The first step of a size may capture its graph, which takes as long as hundreds of steps.
        """
        if self._graph_rows is None:
            return step, True
        step = self._graph_rows.pad(step)
        size = len(step.outcomes), step.num_rows
        if step.num_prompt_rows or size in self._sizes_run:
            return step, True
        self._sizes_run.add(size)
        return step, False

    def forget(self, sequence: Sequence) -> None:
        """Drop all state of a sequence that has ended."""
        self._drafters.pop(sequence, None)
        self._head_use.forget(sequence)
        if self._head is not None:
            self._head.forget(sequence)

    def stats(self) -> DraftStats:
        """Return the counters since the start."""
        longest = max(self._tokens_per_step, default=0)
        return DraftStats(
            sources={
                source: SourceStats(each.num_proposals, tuple(each.verified), tuple(each.accepted))
                for source, each in list(self._sources.items())
            },
            tokens_per_step=tuple(self._tokens_per_step[number] for number in range(longest + 1)),
            off_seconds=dict(self._off_seconds),
            loss_seconds=self._ledger.loss_seconds,
            is_layer_idle=self._head_use.is_idle,
        )

    def _gather(self, requests: Items[DraftRequest]) -> list[Proposal]:
        """Return the proposals that need no draft model."""
        proposals: list[Proposal] = []
        max_indexed = MAX_INDEXED
        for sequence, limit in requests:
            if limit <= 0:
                proposals.append(())
                continue
            drafter = self._drafters.get(sequence)
            if drafter is None:
                drafter = self._drafters[sequence] = SequenceDrafter(
                    sequence, self._eos_token_ids, self._clock, self._follows_grammars
                )
            num_indexed = drafter.num_indexed
            proposal = drafter.propose(limit, max_indexed)
            max_indexed -= min(max_indexed, drafter.num_indexed - num_indexed)
            proposals.append(proposal)
        return proposals

    def _choose(
        self, requests: Items[DraftRequest], proposals: Items[Proposal], num_prompt_rows: int
    ) -> list[int] | None:
        """Return the number of drafts of each sequence; None if this step should measure steps without drafts."""
        num_sequences = len(requests)
        costs, contexts = self._costs, [len(sequence.token_ids) for sequence, _ in requests]
        if self._is_sample_due(num_sequences):
            return None
        survivals = [
            self._rates.survival(proposal, self._drafters[request.sequence].records) if proposal else []
            for request, proposal in zip(requests, proposals, strict=True)
        ]
        if num_prompt_rows:
            return self._choose_mixed(survivals, contexts)
        rows = self._graph_rows
        order = DraftOrder(survivals) if rows is None else EvenDrafts(survivals, rows)
        curve = costs.curve(num_sequences, order.most)
        chosen = order.best(contexts, curve, costs.context_seconds)
        return order.split(self._vary(chosen, order, num_sequences, curve))

    def _vary(self, chosen: int, order: DraftOrder | EvenDrafts, num_sequences: int, curve: Items[float]) -> int:
        """Return `chosen`, or now and then another number of drafts, to learn what it costs and brings."""
        if chosen and self._num_since_sample % VARY_STEPS == VARY_STEPS - 1:
            return self._costs.unmeasured(num_sequences, order.below(chosen)) or chosen
        extra = max(curve[order.most] - curve[chosen], MIN_PROBE * curve[0])
        if chosen < order.most and extra <= self._probe_seconds:
            self._probe_seconds -= extra
            return order.most
        return chosen

    def _choose_mixed(self, survivals: Items[Items[float]], contexts: Items[int]) -> list[int] | None:
        """Return the drafts that save more time in later steps than their rows take next to a prompt's rows."""
        seconds = self._costs.prompt_row_seconds
        plain = self._costs.plain_seconds(len(contexts), sum(contexts))
        if seconds is None or plain is None:
            return None
        least = [
            (1 + HYSTERESIS)
            * (seconds + context * self._costs.draft_context_seconds)
            * len(contexts)
            / max(1e-9, plain)
            for context in contexts
        ]
        return [sum(s > bound for s in each) for each, bound in zip(survivals, least, strict=True)]

    def _follow(self, step: DecodeStep, max_outlier: float) -> None:
        """Learn from a step with drafts. It counts for at most `max_outlier` times its expected duration."""
        num_sequences = len(step.outcomes)
        num_more, num_drafts = step.num_rows - num_sequences, self._num_drafts(step)
        context = step.context_tokens // (step.num_rows if self._graph_rows is None else num_sequences)
        plain = self._costs.plain_seconds(num_sequences, context * num_sequences)
        if plain is None:
            return
        self._num_since_sample += not step.num_prompt_rows
        num_tokens = sum(outcome.num_tokens for outcome in step.outcomes)
        row_seconds: float = context * self._costs.draft_context_seconds
        if step.num_prompt_rows:
            row_seconds += self._costs.prompt_row_seconds or 0.0
            seconds = plain + num_drafts * row_seconds
        else:
            curve = self._costs.curve(num_sequences, num_more)
            row_seconds += (curve[num_more] - curve[0]) / num_drafts
            seconds = min(step.seconds, max_outlier * (plain + num_drafts * row_seconds))
        lost = seconds - plain * num_tokens / num_sequences
        self._ledger.add(step.seconds, lost + self._propose_seconds)
        for outcome in step.outcomes:
            self._tokens_per_step[outcome.num_tokens] += 1
            if outcome.drafts:
                self._learn(outcome, plain / num_sequences, row_seconds)

    def _num_drafts(self, step: DecodeStep) -> int:
        """Return the drafts of a step with drafts. They bear the cost of the padding rows of a graph."""
        if self._graph_rows is None:
            return step.num_rows - len(step.outcomes)
        return max(1, sum(len(outcome.drafts) for outcome in step.outcomes))

    def _learn(self, outcome: DraftOutcome, token_seconds: float, row_seconds: float) -> None:
        drafter = self._drafters.get(outcome.sequence)
        records = {} if drafter is None else drafter.records
        self._rates.learn(outcome.drafts, outcome.num_accepted, records)
        counts: dict[DraftSource, int] = {}
        for place, draft in enumerate(outcome.drafts):
            self._sources.setdefault(draft.source, _SourceCounts()).add(place, place < outcome.num_accepted)
            counts[draft.source] = counts.get(draft.source, 0) + 1
        for source, number in counts.items():
            self._sources[source].num_proposals += 1
            accepted = sum(draft.source is source for draft in outcome.drafts[: outcome.num_accepted])
            saved, record = accepted * token_seconds - number * row_seconds, records.setdefault(source, SourceRecord())
            if source is DraftSource.HEAD and self._head is not None:
                self._head.judge(outcome.sequence, record, number, accepted, saved)
            else:
                record.judge(saved, number, len(outcome.sequence.token_ids))
