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

import math
from bisect import bisect_left, insort
from itertools import count

from weft.engine.sequence import Sequence

LEVEL_SECONDS = 30.0
MAX_PRIORITY = 10


class WaitingLine:
    """Cost does not depend on how many wait, but for a shift of pointers: some microseconds for ten thousand."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self.num_prefill_tokens = 0
        self._line: list[Sequence] = []
        self._numbers = count()

    def __len__(self) -> int:
        return len(self._line)

    @property
    def first(self) -> Sequence:
        """Whose turn it is. There must be one."""
        return self._line[0]

    def enter(self, sequence: Sequence) -> None:
        """A sequence that has never been here: it gets its turn."""
        sequence.turn = (sequence.submitted_at - LEVEL_SECONDS * sequence.spec.priority, next(self._numbers))
        self.put_back(sequence)

    def put_back(self, sequence: Sequence) -> None:
        """A sequence that had its turn already; it keeps it."""
        insort(self._line, sequence, key=_turn)
        self._count(sequence, 1)

    def take(self, sequence: Sequence) -> None:
        """It waits no longer, whatever the reason. Its tokens are still those that it came with."""
        at = bisect_left(self._line, sequence.turn, key=_turn)
        assert self._line[at] is sequence
        del self._line[at]
        self._count(sequence, -1)

    def _count(self, sequence: Sequence, sign: int) -> None:
        self.num_tokens += sign * len(sequence.token_ids)
        if not sequence.has_emitted:
            self.num_prefill_tokens += sign * len(sequence.token_ids)


def _turn(sequence: Sequence) -> tuple[float, int]:
    return sequence.turn


def need(sequence: Sequence, now: float) -> float:
    """Of prompts that are computed in steps to come, the greatest first; equal ones by their turns."""
    waited, seconds_here = now - sequence.turn[0], now - sequence.submitted_at
    if min(waited, seconds_here) > LEVEL_SECONDS:
        return math.inf
    return waited / sequence.num_pending if waited > 0 else waited * sequence.num_pending
