"""NaN in every block that nobody holds: whoever reads one shows it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch

from weft.kv.block_pool import BlockPool


class Poison:
    """Fills every block with NaN in the moment in which it becomes free."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.blocks = torch.empty(0)
        self.num_poisoned = 0
        for name in ("release", "reserve", "unquarantine"):
            monkeypatch.setattr(BlockPool, name, self._watched(getattr(BlockPool, name)))

    def _watched(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(pool: BlockPool, *args: Any) -> Any:
            before = set(pool._free)
            result = method(pool, *args)
            fresh = set(result) if method.__name__ == "reserve" else set()  # evicted ones went through the free list
            self.fill((set(pool._free) - before) | fresh)
            return result

        return call

    def fill(self, blocks: Iterable[int]) -> None:
        """Also what a transfer does that was given up and writes on."""
        chosen = list(blocks)
        if len(self.blocks) and chosen:
            self.blocks[chosen] = float("nan")
            self.num_poisoned += len(chosen)
