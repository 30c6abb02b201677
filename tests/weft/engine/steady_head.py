"""A speculator whose drafts do not depend on measured times: those of the draft model, before every step."""

from __future__ import annotations

from collections.abc import Sequence as Items

from weft.engine.drafting.draft_stats import DraftStats, SourceStats
from weft.engine.drafting.drafter import DecodeStep, DraftHead, DraftRequest, DraftSource, Proposal
from weft.engine.sequence import Sequence

NUM_DRAFTS = 5


class SteadyHead:
    """Always takes NUM_DRAFTS drafts of the draft model, and counts what became of them."""

    def __init__(self) -> None:
        self._head: DraftHead | None = None
        self._num_proposals = 0
        self._verified = [0] * NUM_DRAFTS
        self._accepted = [0] * NUM_DRAFTS

    def set_head(self, head: DraftHead) -> None:
        self._head = head

    def fills_draft_layer(self, sequence: Sequence) -> bool:
        return True

    def propose(self, requests: Items[DraftRequest], num_prompt_rows: int) -> list[Proposal]:
        assert self._head is not None, "WEFT_DRAFT chose no draft model"
        asked = [each._replace(limit=min(each.limit, NUM_DRAFTS)) for each in requests]
        return self._head.draft(asked, lambda sequence, drafts: True)

    def on_step(self, step: DecodeStep) -> None:
        for outcome in step.outcomes:
            self._num_proposals += bool(outcome.drafts)
            for place in range(len(outcome.drafts)):
                self._verified[place] += 1
                self._accepted[place] += place < outcome.num_accepted

    def forget(self, sequence: Sequence) -> None:
        assert self._head is not None
        self._head.forget(sequence)

    def stats(self) -> DraftStats:
        """May be called on any thread."""
        head = SourceStats(self._num_proposals, tuple(self._verified), tuple(self._accepted))
        return DraftStats({DraftSource.HEAD: head}, (), {}, 0.0)
