"""Which sequence gets blocks first, and which prompts a step computes.

Queue: a sequence's queue key is its submission time minus LEVEL_SECONDS for each priority level. Of sequences submitted
together, the higher priority runs first. No sequence starves: one that is a level higher overtakes it only if submitted
within LEVEL_SECONDS, one that is two levels higher within twice that. Keys never change, so the same order decides
preemption: the sequence with the last key is the victim.

Priority: a prompt that has its blocks is ranked by the seconds it has waited per token that it lacks. A short prompt
therefore does not wait behind a long one, and costs the long one almost nothing. The long prompt's rank grows with its
wait and with its progress; after LEVEL_SECONDS no other prompt overtakes it. A priority level counts as time waited.

Bursts: a prompt chunk in a mixed step delays every decoding sequence. When all of them have just started, that delay is
avoidable: the engine computes the prompts of the burst first, and then all sequences decode without interruption. Each
client sees one pause, right after its first tokens. Mixed steps resume when a sequence is past MAX_FIRST_TOKENS, when
the burst needs more than MAX_BURST_STEPS, or when a sequence started MAX_PAUSE_SECONDS ago. Prefill-only sequences and
sequences of different priority never form a burst.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Items
from itertools import count

from weft.engine.config import EngineConfig
from weft.engine.sequence import Sequence

LEVEL_SECONDS = 30.0
MAX_PRIORITY = 10
MAX_BURST_STEPS = 2
# A sequence decodes this many tokens before the last request of the same burst arrives.
MAX_FIRST_TOKENS = 4
# A mesh on two cores computes 2,048 prompt tokens of a 200M model in about this time.
MAX_PAUSE_SECONDS = 2.0


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


def prefill_priority(sequence: Sequence, now: float) -> float:
    """Return the rank of a prompt for the next step. The largest runs first; ties keep the order of the queue."""
    waited, seconds_here = now - sequence.queue_key[0], now - sequence.submitted_at
    if min(waited, seconds_here) > LEVEL_SECONDS:
        return math.inf
    return waited / sequence.num_pending if waited > 0 else waited * sequence.num_pending


def is_burst(config: EngineConfig, decoding: Items[Sequence], prompts: Items[Sequence], now: float) -> bool:
    """Return True if the next step should compute only `prompts` and pause the `decoding` sequences."""
    if not prompts or len(decoding) + len(prompts) < 2 or any(prompt.is_prefill for prompt in prompts):
        return False
    if len({each.spec.priority for each in (*decoding, *prompts)}) > 1:
        return False
    if sum(prompt.num_pending for prompt in prompts) > MAX_BURST_STEPS * config.max_step_tokens:
        return False
    return all(
        each.num_generated_before(each.num_tokens - 1) < MAX_FIRST_TOKENS and now - each.started_at < MAX_PAUSE_SECONDS
        for each in decoding
    )


def burst_step(config: EngineConfig, capacities: Mapping[Sequence, int]) -> Iterator[tuple[Sequence, int]]:
    """Yield the prompts of one burst step with their token counts: whole prompts, spread evenly over the steps left.

    `capacities` maps each prompt, highest priority first, to the number of tokens that its blocks can still take.
    """
    num_pending = sum(prompt.num_pending for prompt in capacities)
    share = num_pending / math.ceil(num_pending / config.max_step_tokens)
    num_taken = 0
    for prompt, capacity in capacities.items():
        num_tokens = min(prompt.num_pending, config.chunk_tokens, capacity)
        if num_taken and num_taken + num_tokens > share:
            return
        if num_tokens > 0:
            num_taken += num_tokens
            yield prompt, num_tokens
