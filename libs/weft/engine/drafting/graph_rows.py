"""The choice of drafts where a step with drafts replays a CUDA graph: all sequences have the same number of rows.

Shorter proposals are padded, and padding costs as much as drafts. The rows of a sequence read its context together.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass, replace

from weft.engine.drafting.costs import HYSTERESIS
from weft.engine.drafting.drafter import DecodeStep


@dataclass(frozen=True, slots=True)
class GraphRows:
    """`counts`: rows of a sequence that graphs have, ascending from 1. `max_rows`: of all sequences together."""

    counts: tuple[int, ...]
    max_rows: int

    def draft_counts(self, num_sequences: int, longest: int) -> list[int]:
        """Return the drafts of a sequence for which there are graphs, up to the first that has room for `longest`."""
        counts = [count - 1 for count in self.counts[1:] if count * num_sequences <= self.max_rows]
        return [count for place, count in enumerate(counts) if not place or counts[place - 1] < longest]

    def pad(self, step: DecodeStep) -> DecodeStep:
        """Return the step as the device computes it: with its padding, and with each context once."""
        num_sequences = len(step.outcomes)
        padded = replace(step, context_tokens=step.context_tokens * num_sequences // step.num_rows)
        longest = max(len(outcome.drafts) for outcome in step.outcomes)
        if step.num_prompt_rows or not longest:
            return padded
        counts = self.draft_counts(num_sequences, longest)
        if not counts or counts[-1] < longest:  # no graph has room
            return padded
        return replace(padded, num_rows=num_sequences * (1 + counts[-1]))


class EvenDrafts:
    """The numbers of drafts of a step, the same for all sequences. `most`: the largest number of further rows.

    `survivals`: see `weft.engine.drafting.costs.DraftOrder`.
    """

    def __init__(self, survivals: Items[Items[float]], rows: GraphRows) -> None:
        self._survivals = survivals
        longest = max(map(len, survivals), default=0)
        self._counts = rows.draft_counts(len(survivals), longest) if longest else []
        self.most = len(survivals) * max(self._counts, default=0)

    def below(self, num_rows: int) -> list[int]:
        """Return the further rows that are fewer than `num_rows`, the most first."""
        return [
            len(self._survivals) * count for count in reversed(self._counts) if count * len(self._survivals) < num_rows
        ]

    def best(self, contexts: Items[int], curve: Items[float], context_seconds: float) -> int:
        """Return the number of further rows that gives the most tokens a second. `contexts` are read in any case."""
        num_sequences, context = len(self._survivals), sum(contexts) * context_seconds
        best, num_best = num_sequences / max(1e-9, curve[0] + context) * (1 + HYSTERESIS), 0
        for count in self._counts:
            tokens = num_sequences + sum(sum(each[:count]) for each in self._survivals)
            if (rate := tokens / max(1e-9, curve[num_sequences * count] + context)) > best:
                best, num_best = rate, num_sequences * count
        return num_best

    def split(self, num_rows: int) -> list[int]:
        """Return the drafts of each sequence in a step with these further rows."""
        return [min(len(each), num_rows // len(self._survivals)) for each in self._survivals]
