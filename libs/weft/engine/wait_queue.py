"""Who goes first: sequences that wait for room, and prompts that wait for a step. Knows neither blocks nor steps.

A sequence's turn is the time at which it came, less LEVEL_SECONDS for each level of its priority. So of those who come
together the higher priority goes first, and nobody starves: a sequence is overtaken by those a level higher only if
they come within LEVEL_SECONDS after it, by those two levels higher within twice that. Turns never change, so the same
order says who is preempted: whoever's turn is last.

Prompts that have room are computed by how long they have waited for each token that they lack: a short one does not
wait for all of a long one, and costs it next to nothing. A long one's wait counts more the longer it lasts and the
less it lacks, and after LEVEL_SECONDS nobody overtakes it any more. What a priority is worth counts as time waited.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from itertools import count

from weft.engine.sequence import Sequence

LEVEL_SECONDS = 30.0
MAX_PRIORITY = 10


class WaitQueue:
    """Cost does not depend on how many wait, but for a shift of pointers: some microseconds for ten thousand."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self.num_prefill_tokens = 0
        self._sequences: list[Sequence] = []
        self._numbers = count()

    def __len__(self) -> int:
        return len(self._sequences)

    @property
    def first(self) -> Sequence:
        """Whose turn it is. There must be one."""
        return self._sequences[0]

    def add(self, sequence: Sequence) -> None:
        """A sequence that has never been here: it gets its turn."""
        sequence.queue_key = (sequence.submitted_at - LEVEL_SECONDS * sequence.spec.priority, next(self._numbers))
        self.requeue(sequence)

    def requeue(self, sequence: Sequence) -> None:
        """A sequence that had its turn already; it keeps it."""
        insort(self._sequences, sequence, key=_queue_key)
        self._count(sequence, 1)

    def remove(self, sequence: Sequence) -> None:
        """It waits no longer, whatever the reason. Its tokens are still those that it came with."""
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
