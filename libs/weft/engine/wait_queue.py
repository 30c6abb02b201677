"""Priority queue of sequences that wait for blocks.

A sequence's queue key is its submission time minus LEVEL_SECONDS for each priority level. Of sequences submitted
together, the higher priority runs first. No sequence starves: one that is a level higher overtakes it only if submitted
within LEVEL_SECONDS, one that is two levels higher within twice that. Keys never change, so the same order decides
preemption: the sequence with the last key is the victim.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from itertools import count

from weft.engine.sequence import Sequence

LEVEL_SECONDS = 30.0
MAX_PRIORITY = 10


class WaitQueue:
    """Insertion is O(log n) plus a shift of pointers, a few microseconds at 10,000 sequences."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self.num_prefill_tokens = 0
        self._sequences: list[Sequence] = []
        self._numbers = count()

    def __len__(self) -> int:
        return len(self._sequences)

    @property
    def first(self) -> Sequence:
        """The sequence with the smallest key. The queue must not be empty."""
        return self._sequences[0]

    def add(self, sequence: Sequence) -> None:
        """Add a new sequence and assign its queue key."""
        sequence.queue_key = (sequence.submitted_at - LEVEL_SECONDS * sequence.spec.priority, next(self._numbers))
        self.requeue(sequence)

    def requeue(self, sequence: Sequence) -> None:
        """Add a preempted sequence with the key that it has."""
        insort(self._sequences, sequence, key=_queue_key)
        self._count(sequence, 1)

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence. Its tokens must be the same as when it was added."""
        at = bisect_left(self._sequences, sequence.queue_key, key=_queue_key)
        assert self._sequences[at] is sequence
        del self._sequences[at]
        self._count(sequence, -1)

    def _count(self, sequence: Sequence, sign: int) -> None:
        self.num_tokens += sign * len(sequence.token_ids)
        if not sequence.has_emitted:
            self.num_prefill_tokens += sign * len(sequence.token_ids)


def _queue_key(sequence: Sequence) -> tuple[float, int]:
    return sequence.queue_key
