"""Counters of a worker since its start, as its reports carry them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PrefixCacheStats:
    """Prompt tokens looked up in caches, tokens found in each tier, and the time spent fetching from the store."""

    looked_up_tokens: int = 0
    pool_tokens: int = 0
    dram_tokens: int = 0
    nvme_tokens: int = 0
    dram_seconds: float = 0.0
    nvme_seconds: float = 0.0


NOTHING_LOOKED_UP = PrefixCacheStats()


@dataclass(frozen=True, slots=True)
class TransferStats:
    """KV transfers from one prefill worker to a decode worker: prompts, bytes, and failed transfers."""

    prefill_worker_id: str
    num_prompts: int = 0
    size_bytes: int = 0
    num_failed: int = 0


@dataclass(frozen=True, slots=True)
class EngineTimeStats:
    """Engine time for decoding and for prompts.

    `generating_*` counts steps that decode. `computing_seconds` counts prompt time; a mixed step contributes by its
    share of prompt tokens. A first token belongs to its prompt.
    """

    generating_steps: int = 0
    generating_seconds: float = 0.0
    computing_seconds: float = 0.0

    def add(self, prompt_tokens: int, text_tokens: int, seconds: float) -> EngineTimeStats:
        """Return the statistics with one more step."""
        share = prompt_tokens / max(prompt_tokens + text_tokens, 1)
        return EngineTimeStats(
            self.generating_steps + (text_tokens > 0),
            self.generating_seconds + (seconds if text_tokens else 0.0),
            self.computing_seconds + share * seconds,
        )


NO_ENGINE_TIME = EngineTimeStats()


@dataclass(frozen=True, slots=True)
class WorkerStats:
    """All counters of a worker's report."""

    prefix: PrefixCacheStats = NOTHING_LOOKED_UP
    transfers: tuple[TransferStats, ...] = ()
    engine_time: EngineTimeStats = NO_ENGINE_TIME


NO_STATS = WorkerStats()
