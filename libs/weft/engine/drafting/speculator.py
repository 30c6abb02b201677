"""Puts the sources of drafts in order, and chooses by measured time how many drafts each step verifies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Items
from itertools import takewhile

from weft.engine.drafting.acceptance import AcceptanceRates, Records, SourceRecord
from weft.engine.drafting.copying import NO_MATCH, CopyIndex, PredictionReader, TextMatch
from weft.engine.drafting.costs import HYSTERESIS, MAX_OUTLIER, DraftOrder, StepCosts
from weft.engine.drafting.draft_stats import DraftStats, OffReason, SourceStats
from weft.engine.drafting.drafter import DecodeStep, DraftOutcome, DraftRequest, DraftSource, DraftToken, Proposal
from weft.engine.drafting.ledger import LossLedger
from weft.engine.sequence import Sequence

# Prompt tokens indexed before a step, for all sequences together; takes about 1 ms.
MAX_INDEXED = 8192
# Tokens for which an index has slots beyond twice the prompt, as most answers end before `max_tokens`.
EXPECTED_ANSWER = 4096
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


class _Drafter:
    """The sources of one sequence without a draft model."""

    __slots__ = ("_ends", "_index", "_reader", "_sequence", "records")

    def __init__(self, sequence: Sequence, eos_token_ids: tuple[int, ...]) -> None:
        spec, text = sequence.spec, sequence.token_ids
        num_answer = min(spec.sampling.max_tokens, EXPECTED_ANSWER + len(text))
        prediction = spec.speculation.prediction
        self._sequence = sequence
        self._index = CopyIndex(text, len(text) + num_answer)
        start = sequence.num_prompt - spec.resumed_tokens
        self._reader = PredictionReader(prediction, text, start) if prediction else None
        self._ends = frozenset((*spec.sampling.stop_token_ids, *(() if sequence.ignores_eos else eos_token_ids)))
        self.records: Records = {}

    @property
    def num_indexed(self) -> int:
        return self._index.num_indexed

    def propose(self, limit: int, max_indexed: int) -> Proposal:
        """Return drafts of the sequence's next tokens, before any end token. Its grammar accepts all of them."""
        copied = self._index.find(max_indexed)
        predicted = NO_MATCH if self._reader is None else self._reader.find()
        constraint = self._sequence.spec.constraint
        if constraint is None and not (copied.length or predicted.length):
            return ()
        drafts: list[DraftToken] = []
        if predicted.length >= copied.length:
            drafts = self._drafts(DraftSource.PREDICTION, predicted, self._reader)
        if not drafts:
            drafts = self._drafts(DraftSource.COPY, copied, self._index)
        if constraint is not None:
            drafts = self._fitting(drafts, limit)
        return tuple(takewhile(lambda draft: draft.token_id not in self._ends, drafts[:limit]))

    def _drafts(
        self, source: DraftSource, match: TextMatch, text: CopyIndex | PredictionReader | None
    ) -> list[DraftToken]:
        """Return the tokens that continue a match, unless the source is shut."""
        if not match.length or text is None or self._is_shut(source):
            return []
        return [DraftToken(token_id, source, match.grade) for token_id in text.copy(match)]

    def _is_shut(self, source: DraftSource) -> bool:
        record = self.records.get(source)
        return record is not None and record.is_shut(len(self._sequence.token_ids))

    def _fitting(self, drafts: list[DraftToken], limit: int) -> list[DraftToken]:
        """Put tokens that the grammar forces before the drafts, and end before one that it refuses."""
        sequence = self._sequence
        constraint = sequence.token_history().advance(sequence.token_ids, len(sequence.token_ids))
        forced = [] if self._is_shut(DraftSource.GRAMMAR) else constraint.forced()[:limit]
        if forced:
            is_continued = [draft.token_id for draft in drafts[: len(forced)]] == forced
            others = drafts[len(forced) :] if is_continued else self._copied_after(forced)
            drafts = [*(DraftToken(token_id, DraftSource.GRAMMAR) for token_id in forced), *others]
        drafts = drafts[:limit]
        return drafts[: constraint.valid([draft.token_id for draft in drafts])] if drafts else drafts

    def _copied_after(self, forced: list[int]) -> list[DraftToken]:
        return self._drafts(DraftSource.COPY, self._index.find_after(forced), self._index)


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
    """Drafts by copies and predictions; implements `weft.engine.drafting.drafter.Speculator`.

    `stats` may be called on any thread.
    """

    def __init__(self, eos_token_ids: tuple[int, ...]) -> None:
        self._eos_token_ids = eos_token_ids
        self._drafters: dict[Sequence, _Drafter] = {}
        self._rates = AcceptanceRates()
        self._costs = StepCosts()
        self._ledger = LossLedger()
        self._num_since_sample = 0
        self._probe_seconds = 0.0
        self._reason: OffReason | None = None  # why the step that was planned last has no drafts
        self._sources: dict[DraftSource, _SourceCounts] = {}
        self._tokens_per_step: Counter[int] = Counter()
        self._off_seconds: dict[OffReason, float] = {}

    def propose(self, requests: Items[DraftRequest], num_prompt_rows: int) -> list[Proposal]:
        """Return the drafts to verify in the next step."""
        self._reason = OffReason.LOSS if self._ledger.is_off else None
        proposals = [] if self._ledger.is_off else self._gather(requests)
        if not proposals:
            return [()] * len(requests)
        counts = self._choose(requests, proposals, num_prompt_rows)
        if counts is None or not any(counts):
            self._reason = OffReason.SAMPLE if counts is None else OffReason.COST
            return [()] * len(requests)
        return [proposal[:count] for proposal, count in zip(proposals, counts, strict=True)]

    def on_step(self, step: DecodeStep) -> None:
        """Learn what the step cost and which drafts were accepted."""
        num_sequences = len(step.outcomes)
        self._probe_seconds = min(MAX_PROBE_SECONDS, self._probe_seconds + PROBE_SHARE * step.seconds)
        if step.num_rows > num_sequences:
            self._follow(step)
        else:
            self._ledger.add(step.seconds)
            self._tokens_per_step[1] += num_sequences
            if not step.num_prompt_rows:
                self._num_since_sample = 0
            if self._reason is not None:
                self._off_seconds[self._reason] = self._off_seconds.get(self._reason, 0.0) + step.seconds
        self._reason = None
        self._costs.measure(step)

    def forget(self, sequence: Sequence) -> None:
        """Drop all state of a sequence that has ended."""
        self._drafters.pop(sequence, None)

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
        )

    def _gather(self, requests: Items[DraftRequest]) -> list[Proposal]:
        """Return the proposals of all sequences; an empty list if there is none."""
        proposals: list[Proposal] = []
        has_drafts = False
        max_indexed = MAX_INDEXED
        for sequence, limit in requests:
            if limit <= 0:
                proposals.append(())
                continue
            drafter = self._drafters.get(sequence)
            if drafter is None:
                drafter = self._drafters[sequence] = _Drafter(sequence, self._eos_token_ids)
            num_indexed = drafter.num_indexed
            proposal = drafter.propose(limit, max_indexed)
            max_indexed -= min(max_indexed, drafter.num_indexed - num_indexed)
            has_drafts = has_drafts or bool(proposal)
            proposals.append(proposal)
        return proposals if has_drafts else []

    def _choose(
        self, requests: Items[DraftRequest], proposals: Items[Proposal], num_prompt_rows: int
    ) -> list[int] | None:
        """Return the number of drafts of each sequence; None if this step should measure steps without drafts."""
        num_sequences = len(requests)
        costs, contexts = self._costs, [len(sequence.token_ids) for sequence, _ in requests]
        if costs.num_measured(num_sequences) < MIN_SAMPLES or self._num_since_sample >= SAMPLE_STEPS:
            return None
        survivals = [
            self._rates.survival(proposal, self._drafters[request.sequence].records) if proposal else []
            for request, proposal in zip(requests, proposals, strict=True)
        ]
        if num_prompt_rows:
            return self._choose_mixed(survivals, contexts)
        order = DraftOrder(survivals)
        curve = costs.curve(num_sequences, num_drafts := sum(map(len, survivals)))
        chosen = order.best(contexts, curve, costs.context_seconds)
        return order.split(self._vary(chosen, num_drafts, num_sequences, curve))

    def _vary(self, chosen: int, num_drafts: int, num_sequences: int, curve: Items[float]) -> int:
        """Return `chosen`, or now and then another number of drafts, to learn what it costs and brings."""
        if chosen and self._num_since_sample % VARY_STEPS == VARY_STEPS - 1:
            return self._costs.unmeasured(num_sequences, chosen - 1) or chosen
        extra = max(curve[num_drafts] - curve[chosen], MIN_PROBE * curve[0])
        if chosen < num_drafts and extra <= self._probe_seconds:
            self._probe_seconds -= extra
            return num_drafts
        return chosen

    def _choose_mixed(self, survivals: Items[Items[float]], contexts: Items[int]) -> list[int] | None:
        """Return the drafts that save more time in later steps than their rows take next to a prompt's rows."""
        seconds = self._costs.prompt_row_seconds
        plain = self._costs.plain_seconds(len(contexts), sum(contexts))
        if seconds is None or plain is None:
            return None
        least = [
            (1 + HYSTERESIS) * (seconds + context * self._costs.context_seconds) * len(contexts) / max(1e-9, plain)
            for context in contexts
        ]
        return [sum(s > bound for s in each) for each, bound in zip(survivals, least, strict=True)]

    def _follow(self, step: DecodeStep) -> None:
        """Learn from a step with drafts."""
        num_sequences = len(step.outcomes)
        num_drafts = step.num_rows - num_sequences
        context = step.context_tokens // step.num_rows
        plain = self._costs.plain_seconds(num_sequences, context * num_sequences)
        if plain is None:
            return
        self._num_since_sample += not step.num_prompt_rows
        num_tokens = sum(outcome.num_tokens for outcome in step.outcomes)
        row_seconds: float = context * self._costs.context_seconds
        if step.num_prompt_rows:
            row_seconds += self._costs.prompt_row_seconds or 0.0
            seconds = plain + num_drafts * row_seconds
        else:
            curve = self._costs.curve(num_sequences, num_drafts)
            row_seconds += (curve[num_drafts] - curve[0]) / num_drafts
            seconds = min(step.seconds, MAX_OUTLIER * (plain + num_drafts * row_seconds))
        self._ledger.add(step.seconds, seconds - plain * num_tokens / num_sequences)
        for outcome in step.outcomes:
            self._tokens_per_step[outcome.num_tokens] += 1
            if outcome.drafts:
                self._learn(outcome, plain / num_sequences, row_seconds)

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
            record = records.setdefault(source, SourceRecord())
            saved = accepted * token_seconds - number * row_seconds
            record.judge(saved, number, len(outcome.sequence.token_ids))
