"""What a worker has counted since its start, as it tells the fleet: caches and hand-offs. Values only."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PrefixTally:
    """Prompt tokens that were looked up in caches, and those found in the worker's pool, the store's memory, its
    disk."""

    looked_up_tokens: int = 0
    pool_tokens: int = 0
    dram_tokens: int = 0
    nvme_tokens: int = 0


NOTHING_LOOKED_UP = PrefixTally()


@dataclass(frozen=True, slots=True)
class HandOffTally:
    """What one lender has handed off to a decode worker: prompts, their bytes, and those that were thrown away."""

    prefill_worker_id: str
    num_prompts: int = 0
    size_bytes: int = 0
    num_failed: int = 0


@dataclass(frozen=True, slots=True)
class Tallies:
    """Both, as they go into a report."""

    prefix: PrefixTally = NOTHING_LOOKED_UP
    hand_offs: tuple[HandOffTally, ...] = ()


NO_TALLIES = Tallies()
