"""Drafts of one sequence: forced by its grammar, read from the prediction, or copied."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items
from itertools import takewhile

from weft.engine.drafting.acceptance import Records, SourceRecord
from weft.engine.drafting.copying import NO_MATCH, CopyIndex, PredictionReader, TextMatch
from weft.engine.drafting.drafter import DraftSource, DraftToken, Proposal
from weft.engine.messages import Constraint
from weft.engine.sequence import Sequence

# Tokens for which an index has slots beyond twice the prompt, as most answers end before `max_tokens`.
EXPECTED_ANSWER = 4096


class SequenceDrafter:
    """Asks the sources that need no draft model, in this order: grammar, prediction, copy.

    `records`: what the sources achieved in this sequence.
    """

    __slots__ = ("_clock", "_ends", "_follows_grammar", "_index", "_reader", "_sequence", "records")

    def __init__(
        self, sequence: Sequence, eos_token_ids: tuple[int, ...], clock: Callable[[], float], follows_grammar: bool
    ) -> None:
        """`follows_grammar`: also draft the tokens that the sequence's grammar forces."""
        self._clock = clock
        self._follows_grammar = follows_grammar
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
        """Tokens of the sequence that copies can start from."""
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
        return self._before_end(drafts[:limit])

    def fit(self, drafts: Proposal, limit: int) -> Proposal:
        """Cut drafts before the first end token, and before the first one that the grammar refuses."""
        drafts = self._before_end(drafts[:limit])
        sequence = self._sequence
        if not drafts or sequence.spec.constraint is None:
            return drafts
        constraint = sequence.token_history().advance(sequence.token_ids, len(sequence.token_ids))
        return drafts[: constraint.valid([draft.token_id for draft in drafts])]

    def _before_end(self, drafts: Items[DraftToken]) -> Proposal:
        return tuple(takewhile(lambda draft: draft.token_id not in self._ends, drafts))

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
        is_off = not self._follows_grammar or self._is_shut(DraftSource.GRAMMAR)
        forced = [] if is_off else self._forced(constraint)[:limit]
        if forced:
            is_continued = [draft.token_id for draft in drafts[: len(forced)]] == forced
            others = drafts[len(forced) :] if is_continued else self._copied_after(forced)
            drafts = [*(DraftToken(token_id, DraftSource.GRAMMAR) for token_id in forced), *others]
        drafts = drafts[:limit]
        return drafts[: constraint.valid([draft.token_id for draft in drafts])] if drafts else drafts

    def _forced(self, constraint: Constraint) -> list[int]:
        """Return the tokens that the grammar forces.

        The source must earn the time that asking takes: 2 us a token, 60 us at first.
        """
        started_at = self._clock()
        forced = constraint.forced()
        record = self.records.setdefault(DraftSource.GRAMMAR, SourceRecord())
        record.judge(started_at - self._clock(), 0, len(self._sequence.token_ids))
        return forced

    def _copied_after(self, forced: list[int]) -> list[DraftToken]:
        return self._drafts(DraftSource.COPY, self._index.find_after(forced), self._index)
