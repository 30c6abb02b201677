"""What kvstore answers when it is asked where a prompt's blocks lie. Values only; no wire."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Holding:
    """A worker that has the first `num_blocks` blocks of a prompt in its pool."""

    worker_id: str
    boot_id: str
    num_blocks: int


@dataclass(frozen=True, slots=True)
class Located:
    """Who holds leading blocks of a prompt, as kvstore says: workers, and so many of them the store; of these the first
    `num_in_memory` need no disk."""

    workers: tuple[Holding, ...] = ()
    num_stored: int = 0
    num_in_memory: int = 0
