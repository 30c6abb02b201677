"""Time to first token with all but the last block of a prompt in each tier, against computing it; and at every length.

    python -m loadtest.kv.tiers --out build/tiers            a Llama of 213 million random weights, 2,000 tokens
    python -m loadtest.kv.tiers --out build/tiers --rounds 5 --lengths 16,64,256,1024

One prefill worker, its engine and store client as in service, one thread. Every figure is the median over rounds, each
of which begins with an empty pool (but for the pool's own row). DRAM: the blocks lie in the Mooncake Store's memory.
NVMe: kvstore was started anew and its files were dropped from the page cache. The second table lets the estimate choose
at every prefix length: it must never be slower than computing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from loadtest.engine.cpu_task import VOCAB_SIZE
from loadtest.kv.node import KvStoreNode
from loadtest.kv.prefill import Answer, Shape, prefilling, read_weights
from loadtest.models import make_model
from loadtest.report import verdict
from weft.kv.block_pool import Tier
from weft.worker.store_reader import FetchCostModel

BLOCK_TOKENS = 16
SEGMENT_BYTES, DISK_BYTES = 1 << 30, 4 << 30
SETTLE_SECONDS = 60.0
POLL_SECONDS = 0.05
LENGTHS = [16, 32, 64, 128, 256, 512, 1024, 1984]
SLACK = 1.05  # "never slower than computing", but for noise
BARS = {"pool": 20.0, "dram": 5.0, "nvme": 3.0}


@dataclass
class Bench:
    """What all measurements share. The estimate learns over all of them, as a worker's does over its life."""

    node: KvStoreNode
    shape: Shape
    weights: Mapping[str, Tensor]
    estimate: FetchCostModel
    rng: random.Random

    def prompt(self, num_tokens: int) -> list[int]:
        """One that was never asked before."""
        return [self.rng.randrange(1, VOCAB_SIZE) for _ in range(num_tokens)]

    async def ask(self, token_ids: list[int], with_store: bool = True) -> Answer:
        """Of a worker with an empty pool that has answered one other prompt."""
        shape = self.shape if with_store else replace(self.shape, store="")
        async with prefilling(shape, self.weights, self.estimate) as worker:
            await worker.ask(self.prompt(2 * BLOCK_TOKENS))
            return await worker.ask(token_ids)

    async def fill(self, prompts: list[list[int]]) -> None:
        """Compute these once and wait until they are on disk."""
        async with prefilling(self.shape, self.weights, self.estimate) as worker:
            for token_ids in prompts:
                before = self.node.describe().num_disk_blocks
                await worker.ask(token_ids)
                await self._until_on_disk(before + len(token_ids) // BLOCK_TOKENS)

    async def pooled(self, token_ids: list[int]) -> tuple[Answer, Answer]:
        """Computed, then asked again of the same worker."""
        async with prefilling(replace(self.shape, store=""), self.weights, self.estimate) as worker:
            await worker.ask(self.prompt(2 * BLOCK_TOKENS))
            return await worker.ask(token_ids), await worker.ask(token_ids)

    async def _until_on_disk(self, num_blocks: int) -> None:
        async with asyncio.timeout(SETTLE_SECONDS):
            while self.node.describe().num_disk_blocks < num_blocks:  # noqa: ASYNC110 (another process)
                await asyncio.sleep(POLL_SECONDS)

    def empty_memory(self) -> None:
        """Leave what is on disk."""
        self.node.restart()
        self.node.forget_cached()


async def first_token(bench: Bench, num_tokens: int, rounds: int) -> list[dict[str, Any]]:
    """The first table."""
    seconds: dict[str, list[float]] = {name: [] for name in ("computed", *BARS)}
    for _ in range(rounds):
        token_ids = bench.prompt(num_tokens)
        computed, pooled = await bench.pooled(token_ids)
        seconds["computed"].append(computed.seconds)
        seconds["pool"].append(pooled.seconds)
        await bench.fill([token_ids])
        for tier in (Tier.DRAM, Tier.NVME):
            if tier is Tier.NVME:
                bench.empty_memory()
            answer = await bench.ask(token_ids)
            if answer.token_id != computed.token_id:
                raise AssertionError(f"another first token from {tier}: {answer.token_id}, {computed.token_id}")
            if answer.tokens_by_tier.get(tier, 0) < num_tokens - 2 * BLOCK_TOKENS:
                raise AssertionError(f"expected the prompt from {tier}, found {answer.tokens_by_tier}")
            seconds[tier].append(answer.seconds)
    base = statistics.median(seconds["computed"])
    return [
        {"from": name, "ttft_ms": 1000 * statistics.median(each), "times_faster": base / statistics.median(each)}
        for name, each in seconds.items()
    ]


async def by_length(bench: Bench, lengths: list[int], rounds: int) -> list[dict[str, Any]]:
    """The second table: so many tokens in a tier and one block behind them."""
    rows: list[dict[str, Any]] = []
    for length in lengths:
        computed, dram, nvme = [], [], []
        taken: dict[str, int] = {}
        for _ in range(rounds):
            token_ids = bench.prompt(length + BLOCK_TOKENS)
            computed.append((await bench.ask(token_ids, with_store=False)).seconds)
            await bench.fill([token_ids])
            answer = await bench.ask(token_ids)
            dram.append(answer.seconds)
            taken["dram"] = answer.tokens_by_tier.get(Tier.DRAM, 0)
            bench.empty_memory()
            answer = await bench.ask(token_ids)
            nvme.append(answer.seconds)
            taken["nvme"] = answer.tokens_by_tier.get(Tier.NVME, 0)
        medians = [1000 * statistics.median(each) for each in (computed, dram, nvme)]
        names = ("computed_ms", "dram_ms", "nvme_ms")
        rows.append({"prefix_tokens": length, **dict(zip(names, medians, strict=True)), "fetched": taken})
        is_met = max(medians[1:]) <= SLACK * medians[0]
        print(rows[-1], verdict(is_met, f"computing and {SLACK - 1:.0%}"), flush=True)
    return rows


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Everything, on a kvstore of its own."""
    num_params = make_model(options.model)
    rng = random.Random()
    with tempfile.TemporaryDirectory(prefix="weft-tiers-", dir=options.disk) as directory:
        node = KvStoreNode(SEGMENT_BYTES, Path(directory), DISK_BYTES)
        # an eighth of a pool may wait for the store at a time, and a whole prompt is to get there
        num_blocks = 8 * (options.tokens // BLOCK_TOKENS + 4)
        with node:
            shape = Shape(options.model, num_blocks, BLOCK_TOKENS, node.address)
            estimate = FetchCostModel(BLOCK_TOKENS, shape.chunk_tokens)
            bench = Bench(node, shape, read_weights(options.model), estimate, rng)
            await bench.pooled(bench.prompt(2 * shape.chunk_tokens))
            first = await first_token(bench, options.tokens, options.rounds)
            for row in first:
                bar = BARS.get(row["from"])
                told = verdict(row["times_faster"] >= bar, f"{bar:g}x") if bar else ""
                print(f"{row['from']:>9} {row['ttft_ms']:9.1f} ms {row['times_faster']:7.1f}x  {told}", flush=True)
            lengths = await by_length(bench, options.lengths, options.rounds)
    return {"parameters": num_params, "tokens": options.tokens, "first_token": first, "by_length": lengths}


def main() -> None:
    """Run, print, keep as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the model and the results")
    # not the system's temporary folder: that is memory on many machines
    parser.add_argument("--disk", type=Path, help="where the disk tier's files lie; default: in --out")
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--lengths", type=lambda text: [int(each) for each in text.split(",")], default=LENGTHS)
    options = parser.parse_args()
    options.model, options.disk = options.out / "llama-213m", options.disk or options.out
    torch.set_num_threads(1)
    options.out.mkdir(parents=True, exist_ok=True)
    result = asyncio.run(measure(options))
    (options.out / "tiers.json").write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
