"""A speculator that knows how texts go on, and proposes right and wrong drafts as a test wants them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Items
from random import Random

from weft.engine.drafting.drafter import DecodeStep, DraftHead, DraftRequest, DraftSource, DraftToken, Proposal
from weft.engine.sequence import Sequence

Continuation = Callable[[Sequence, int], Items[int]]
SOURCES = tuple(DraftSource)
VOCAB_SIZE = 100  # wrong drafts are below this


class ScriptedSpeculator:
    """Checks the scheduler's side of `Speculator`, and that every sequence is forgotten.

    - `continuation`: at most so many of the tokens that come next.
    - `share_right`: of drafts that are right. Others are random. Right ones may follow wrong ones.
    - `is_varied`: numbers of drafts from 0 to the limit, otherwise the limit.
    """

    def __init__(
        self, continuation: Continuation, share_right: float = 1.0, is_varied: bool = False, seed: int = 0
    ) -> None:
        self.steps: list[DecodeStep] = []
        self.known: set[Sequence] = set()
        self.proposed: dict[Sequence, Proposal] = {}
        self.head: DraftHead | None = None
        self._continuation = continuation
        self._share_right = share_right
        self._is_varied = is_varied
        self._random = Random(seed)

    def set_head(self, head: DraftHead) -> None:
        self.head = head

    def fills_draft_layer(self, sequence: Sequence) -> bool:
        return True

    def propose(self, requests: Items[DraftRequest], num_prompt_rows: int) -> list[Proposal]:
        assert num_prompt_rows >= 0
        self.proposed.clear()
        for sequence, limit in requests:
            assert sequence.is_decoding, "only sequences that decode are asked for"
            assert not sequence.has_step_in_flight, "the host must know all tokens"
            assert not limit or sequence.spec.speculation.is_enabled
            self.known.add(sequence)
            self.proposed[sequence] = self._proposal(sequence, limit)
        return list(self.proposed.values())

    def on_step(self, step: DecodeStep) -> None:
        for sequence, drafts, num_accepted, num_tokens in step.outcomes:
            assert drafts == self.proposed.get(sequence, ())[: len(drafts)]
            assert num_accepted <= len(drafts)
            assert num_tokens <= num_accepted + 1
            right = tuple(draft.token_id for draft in drafts[:num_accepted])
            gained = tuple(sequence.token_ids[len(sequence.token_ids) - num_tokens :])
            assert gained[:num_accepted] == right[: len(gained)]
        assert step.num_rows >= sum(1 + len(outcome.drafts) for outcome in step.outcomes)
        self.proposed.clear()
        self.steps.append(step)

    def forget(self, sequence: Sequence) -> None:
        self.known.discard(sequence)

    @property
    def num_accepted(self) -> int:
        return sum(outcome.num_accepted for step in self.steps for outcome in step.outcomes)

    @property
    def num_verified(self) -> int:
        return sum(len(outcome.drafts) for step in self.steps for outcome in step.outcomes)

    def _proposal(self, sequence: Sequence, limit: int) -> Proposal:
        count = self._random.randint(0, limit) if self._is_varied else limit
        right = self._continuation(sequence, count)
        return tuple(
            DraftToken(
                token if self._random.random() < self._share_right else self._random.randrange(VOCAB_SIZE),
                self._random.choice(SOURCES),
            )
            for token in right
        )


def reader_of(texts: Mapping[str, Items[int]]) -> Continuation:
    """Continuations that are read from whole texts, with their prompts, by request id."""

    def read(sequence: Sequence, count: int) -> Items[int]:
        start = len(sequence.token_ids)
        return texts.get(sequence.spec.key.request_id, ())[start : start + count]

    return read
