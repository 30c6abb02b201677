"""Which prompts a step computes, and how much of each.

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
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Items

from weft.engine.config import EngineConfig
from weft.engine.sequence import Sequence
from weft.engine.wait_queue import LEVEL_SECONDS

MAX_BURST_STEPS = 2
# A sequence decodes this many tokens before the last request of the same burst arrives.
MAX_FIRST_TOKENS = 4
# A mesh on two cores computes 2,048 prompt tokens of a 200M model in about this time.
MAX_PAUSE_SECONDS = 2.0


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
