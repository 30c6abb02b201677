"""One prefill worker of a replay: prompts as JSON lines on stdin, what was found in which tier on stdout."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import sys
from pathlib import Path

import torch

from loadtest.kv.prefill import Shape, prefilling, read_weights
from weft import metrics
from weft.kv.block_pool import Tier
from weft.worker.store_reader import AlwaysFetch, FetchCostModel


async def main() -> None:
    """Until stdin ends; one prompt at a time."""
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what a library prints must not mix with replies
    torch.set_num_threads(1)
    settings = json.loads(sys.argv[1])
    # What is replayed is how much the tiers keep, not what is worth fetching for so small a model.
    kind = FetchCostModel if settings.pop("chooses") else AlwaysFetch
    shape = Shape(**{**settings, "model": Path(settings["model"])})
    estimate = kind(shape.block_tokens, shape.chunk_tokens)
    async with prefilling(shape, read_weights(shape.model), estimate) as worker:
        replies.write("{}\n")
        while line := await asyncio.to_thread(sys.stdin.readline):
            answer = await worker.ask(json.loads(line))
            replies.write(json.dumps(dataclasses.asdict(answer)) + "\n")
    replies.write(json.dumps({"blocks": _outcomes(), "decisions": _decisions()}) + "\n")


def _outcomes() -> dict[str, int]:
    names = ("put", "got", "skipped", "failed")
    return {name: int(metrics.STORE_BLOCKS.labels(name)._value.get()) for name in names}


def _decisions() -> dict[str, int]:
    pairs = [(tier, decision) for tier in (Tier.DRAM, Tier.NVME) for decision in ("fetch", "compute")]
    return {
        f"{tier} {decision}": int(metrics.TIER_DECISIONS.labels(tier, decision)._value.get())
        for tier, decision in pairs
    }


if __name__ == "__main__":
    asyncio.run(main())
