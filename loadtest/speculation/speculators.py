"""Speculators of the benchmark: exchanged between runs, of one source, and with drafts from recorded answers."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Items
from itertools import takewhile
from random import Random

from weft.engine.drafting.drafter import (
    DecodeStep,
    DraftHead,
    DraftRequest,
    DraftSource,
    DraftToken,
    Proposal,
    Speculator,
)
from weft.engine.drafting.speculator import AdaptiveSpeculator
from weft.engine.sequence import Sequence


class ExchangeableSpeculator:
    """Passes everything to `current`; without one there are no drafts. Exchange it only while the engine is idle."""

    def __init__(self) -> None:
        self.current: Speculator | None = None
        self._head: DraftHead | None = None

    def set_head(self, head: DraftHead) -> None:
        self._head = head

    def use(self, speculator: Speculator | None) -> None:
        """Draft with this one from now on."""
        self.current = speculator
        if speculator is not None and self._head is not None:
            speculator.set_head(self._head)

    def fills_draft_layer(self, sequence: Sequence) -> bool:
        return self.current is None or self.current.fills_draft_layer(sequence)

    def propose(self, requests: Items[DraftRequest], num_prompt_rows: int) -> list[Proposal]:
        if self.current is None:
            return [()] * len(requests)
        return self.current.propose(requests, num_prompt_rows)

    def on_step(self, step: DecodeStep) -> None:
        if self.current is not None:
            self.current.on_step(step)

    def forget(self, sequence: Sequence) -> None:
        if self.current is not None:
            self.current.forget(sequence)


class OneSource:
    """Keeps the drafts of one source, up to the first draft of another."""

    def __init__(self, speculator: Speculator, source: DraftSource) -> None:
        self._speculator, self._source = speculator, source

    def set_head(self, head: DraftHead) -> None:
        self._speculator.set_head(head)

    def fills_draft_layer(self, sequence: Sequence) -> bool:
        return self._speculator.fills_draft_layer(sequence)

    def propose(self, requests: Items[DraftRequest], num_prompt_rows: int) -> list[Proposal]:
        proposals = self._speculator.propose(requests, num_prompt_rows)
        return [tuple(takewhile(lambda draft: draft.source is self._source, each)) for each in proposals]

    def on_step(self, step: DecodeStep) -> None:
        self._speculator.on_step(step)

    def forget(self, sequence: Sequence) -> None:
        self._speculator.forget(sequence)


class HeadAlone(AdaptiveSpeculator):
    """Drafts with the draft model alone."""

    def _gather(self, requests: Items[DraftRequest]) -> list[Proposal]:
        super()._gather(requests)  # makes what the draft model needs of each sequence
        return [()] * len(requests)


class RecordedSpeculator:
    """Drafts `num_drafts` tokens of recorded answers; each is right with probability `alpha`.

    `answers`: tokens by request id. After a wrong draft the others do not matter.
    """

    def __init__(self, answers: Mapping[str, Items[int]], alpha: float, num_drafts: int, vocab_size: int) -> None:
        self._answers, self._alpha, self._num_drafts = answers, alpha, num_drafts
        self._vocab_size = vocab_size
        self._random = Random(0)

    def set_head(self, head: DraftHead) -> None:
        """The answers are known already."""

    def fills_draft_layer(self, sequence: Sequence) -> bool:
        """No draft model uses the layer."""
        return False

    def propose(self, requests: Items[DraftRequest], num_prompt_rows: int) -> list[Proposal]:
        return [self._draft(sequence, min(limit, self._num_drafts)) for sequence, limit in requests]

    def on_step(self, step: DecodeStep) -> None:
        """Nothing is learned."""

    def forget(self, sequence: Sequence) -> None:
        """Nothing is kept."""

    def _draft(self, sequence: Sequence, count: int) -> Proposal:
        start = len(sequence.token_ids) - sequence.num_prompt
        right = self._answers[sequence.spec.key.request_id][start : start + count]
        # The last token of an answer ends it, and no draft may be an end token.
        right = right[: max(0, len(self._answers[sequence.spec.key.request_id]) - 1 - start)]
        return tuple(DraftToken(self._miss(token_id), DraftSource.HEAD) for token_id in right)

    def _miss(self, token_id: int) -> int:
        return token_id if self._random.random() < self._alpha else (token_id + 7) % self._vocab_size
