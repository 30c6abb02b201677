"""What the engine's step scheduler and the drafters tell each other.

A draft is a token that may come next. The model verifies all drafts of a sequence in one step: every row is sampled at
its own position, and a draft is accepted while it equals the sample before it. Drafts change speed, never the text.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, Protocol

from weft.engine.sequence import Sequence


class DraftSource(StrEnum):
    """What proposed a token; the value is the label in metrics.

    GRAMMAR: the only token that the answer's grammar allows. PREDICTION: a copy of the client's predicted answer. COPY:
    a copy of earlier tokens of the sequence. HEAD: a draft model.
    """

    GRAMMAR = "grammar"
    PREDICTION = "prediction"
    COPY = "copy"
    HEAD = "head"


class DraftToken(NamedTuple):
    """A proposed token. `grade`: a small number by which its source rates the proposal, such as the length of a match.

    Acceptance is averaged by source, grade and place in the proposal.
    """

    token_id: int
    source: DraftSource
    grade: int = 0


Proposal = tuple[DraftToken, ...]


class DraftRequest(NamedTuple):
    """A sequence that decodes in the next step, and the maximum number of its drafts.

    `limit` is 0 for a sequence that must not draft now. It respects max_tokens, the context and, for each sequence
    alone, the free blocks and the rows of a step.
    """

    sequence: Sequence
    limit: int


class DraftOutcome(NamedTuple):
    """The drafts of a sequence in a finished step, and how many of them, from the first one, were accepted.

    `num_tokens`: tokens that the sequence gained, at least 1 unless it failed or ended before.
    """

    sequence: Sequence
    drafts: Proposal
    num_accepted: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """Size, duration and outcome of a finished step with decoding sequences.

    - `outcomes`: one for each decoding sequence, also without drafts.
    - `num_rows`: rows of decoding sequences, one each and one for each draft. `num_prompt_rows`: all other rows.
    - `context_tokens`: context lengths of the decoding rows, summed over rows.
    """

    outcomes: Items[DraftOutcome]
    num_rows: int
    num_prompt_rows: int
    context_tokens: int
    seconds: float


class DraftHead(Protocol):
    """Drafts by a draft model, see `weft.model.draft`. Used only on the engine's thread."""

    def draft(
        self, requests: Items[DraftRequest], goes_on: Callable[[Sequence, Items[DraftToken]], bool]
    ) -> list[Proposal]:
        """Return at most `limit` drafts for each request; none if the state of the token before the last is not here.

        `goes_on`: says after each draft whether the sequence should have another one.
        """

    def forget(self, sequence: Sequence) -> None:
        """Drop all state of a sequence that has ended."""


class Speculator(Protocol):
    """Chooses the drafts of each step. Used only on the engine's thread."""

    def set_head(self, head: DraftHead) -> None:
        """Also draft with a draft model. Called once, before the first step."""

    def fills_draft_layer(self, sequence: Sequence) -> bool:
        """Return True if the sequence's next step should fill the draft layer.

        Asked when a sequence is admitted, and before each step that decodes it. Tokens that do not fill the layer stay
        invisible to the draft model.
        """

    def propose(self, requests: Items[DraftRequest], num_prompt_rows: int) -> list[Proposal]:
        """Return the drafts of each request, at most its `limit`; empty for none.

        The host knows all tokens of these sequences. A proposal ends before the first end token, and a grammar accepts
        all of it. `num_prompt_rows`: prompt tokens that the same step computes.
        """

    def on_step(self, step: DecodeStep) -> None:
        """Learn from a finished step. Its accepted tokens are already part of the sequences."""

    def forget(self, sequence: Sequence) -> None:
        """Drop all state of a sequence that has ended."""
