"""Bursts: requests that arrive together start together, and pause only at their first tokens.

A prompt chunk beside generating sequences delays all of them. When every generating sequence has just started, that
delay is avoidable: the engine computes the prompts of the burst first, and all sequences then generate without
interruption. Each client sees one pause, right after its first tokens. Mixed steps resume when a sequence is past
MAX_FIRST_TOKENS, when the burst is longer than two steps, or when a sequence started MAX_PAUSE_SECONDS ago.
Prefill workers and requests of unlike priority are exempt: their prompts run one after the other.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Items

from weft.engine.config import EngineConfig
from weft.engine.sequence import Sequence

MAX_BURST_STEPS = 2
# A sequence generates this many while the requests that were sent with it are still on their way here.
MAX_FIRST_TOKENS = 4
# A mesh on two cores computes 2,048 prompt tokens of a 200M model in about this time.
MAX_PAUSE_SECONDS = 2.0


def is_burst(config: EngineConfig, generating: Items[Sequence], prompts: Items[Sequence], now: float) -> bool:
    """True if the next step should compute `prompts` alone and pause the `generating` sequences."""
    if not prompts or len(generating) + len(prompts) < 2 or any(prompt.is_prefill for prompt in prompts):
        return False
    if len({each.spec.priority for each in (*generating, *prompts)}) > 1:
        return False
    if sum(prompt.num_pending for prompt in prompts) > MAX_BURST_STEPS * config.max_step_tokens:
        return False
    return all(
        each.num_preceding < MAX_FIRST_TOKENS and now - each.started_at < MAX_PAUSE_SECONDS for each in generating
    )


def burst_step(config: EngineConfig, rooms: Mapping[Sequence, int]) -> Iterator[tuple[Sequence, int]]:
    """Yield the prompts of one step with their number of tokens: whole prompts, divided evenly between the steps left.

    `rooms`: the prompts in the order of their priority, each with the tokens that its pages can still take.
    """
    num_pending = sum(prompt.num_pending for prompt in rooms)
    share = num_pending / math.ceil(num_pending / config.max_step_tokens)
    num_taken = 0
    for prompt, room in rooms.items():
        num_tokens = min(prompt.num_pending, config.chunk_tokens, room)
        if num_taken and num_taken + num_tokens > share:
            return
        if num_tokens > 0:
            num_taken += num_tokens
            yield prompt, num_tokens
