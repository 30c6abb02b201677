"""What a worker has counted since its start, as it tells the fleet: caches, hand-offs and work. Values only."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PrefixTally:
    """Prompt tokens that were looked up in caches, and those found in the worker's pool, the store's memory, its
    disk; and what getting those of the store took."""

    looked_up_tokens: int = 0
    pool_tokens: int = 0
    dram_tokens: int = 0
    nvme_tokens: int = 0
    dram_seconds: float = 0.0
    nvme_seconds: float = 0.0


NOTHING_LOOKED_UP = PrefixTally()


@dataclass(frozen=True, slots=True)
class HandOffTally:
    """What one lender has handed off to a decode worker: prompts, their bytes, and those that were thrown away."""

    prefill_worker_id: str
    num_prompts: int = 0
    size_bytes: int = 0
    num_failed: int = 0


@dataclass(frozen=True, slots=True)
class WorkTally:
    """Steps in which sequences went on with their texts and their time; the time of prompts, of a step with both their
    share of its tokens. A first token is its prompt's."""

    generating_steps: int = 0
    generating_seconds: float = 0.0
    computing_seconds: float = 0.0

    def add(self, prompt_tokens: int, text_tokens: int, seconds: float) -> WorkTally:
        """With one more step."""
        share = prompt_tokens / max(prompt_tokens + text_tokens, 1)
        return WorkTally(
            self.generating_steps + (text_tokens > 0),
            self.generating_seconds + (seconds if text_tokens else 0.0),
            self.computing_seconds + share * seconds,
        )


NO_WORK = WorkTally()


@dataclass(frozen=True, slots=True)
class Tallies:
    """All, as they go into a report."""

    prefix: PrefixTally = NOTHING_LOOKED_UP
    hand_offs: tuple[HandOffTally, ...] = ()
    work: WorkTally = NO_WORK


NO_TALLIES = Tallies()
