"""Counters of speculation since the engine started, as a value that metrics can be made of. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from weft.engine.drafting.drafter import DraftSource


class OffReason(StrEnum):
    """Why a step with proposed drafts verified none of them; the value is the label in metrics.

    COST: rows for drafts cost more time than their expected tokens save. LOSS: speculation lost more time than allowed
    and is off for some seconds. SAMPLE: the step measures what plain steps cost.
    """

    COST = "cost"
    LOSS = "loss"
    SAMPLE = "sample"


@dataclass(frozen=True, slots=True)
class SourceStats:
    """Drafts of one source. Element i of `verified` and `accepted` counts draft tokens at place i of their step.

    `num_proposals`: proposals with a verified token of this source.
    """

    num_proposals: int = 0
    verified: tuple[int, ...] = ()
    accepted: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class DraftStats:
    """All counters; each only grows, but for the last two.

    - `sources`: one entry for each source that had a draft verified.
    - `tokens_per_step`: element n counts decode steps of one sequence that gained n tokens.
    - `off_seconds`: duration of the steps in which no proposed draft was verified.
    - `loss_seconds`: time by which speculation was slower than plain decoding lately; 0 while it gains.
    - `is_layer_idle`: sequences leave out the draft layer, because drafts of the draft model do not pay.
    """

    sources: Mapping[DraftSource, SourceStats]
    tokens_per_step: tuple[int, ...]
    off_seconds: Mapping[OffReason, float]
    loss_seconds: float
    is_layer_idle: bool = False
