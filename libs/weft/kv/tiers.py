"""Storage tiers of blocks, fastest first. The names are the same in every process, metric and message."""

from __future__ import annotations

from enum import StrEnum


class Tier(StrEnum):
    """POOL: a worker's own memory. DRAM: memory of the shared store. NVME: the store's disk."""

    POOL = "pool"
    DRAM = "dram"
    NVME = "nvme"
