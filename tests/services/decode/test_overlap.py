"""Blocks move while the next chunk is computed, so that only the last chunk's are waited for. Nothing here is timed:
prefill computes a chunk when all blocks before it have arrived, which they would never do after it."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from tests.services.attach import prompt
from tests.services.workers import BLOCK_TOKENS, CHUNK_TOKENS, Meddler, Pair, start_pair
from tests.weft.tiny_llama import Tiny
from weft.engine.messages import PromptCounts
from weft.kv.transfer import CopyRange
from weft.request import PromptUsage
from weft.rpc.wire import usage_to_wire
from weft_services.decode import remote_prefill
from weft_services.decode.sequences import MAX_US, StageClock

NUM_CHUNKS, CHUNK_BLOCKS = 5, CHUNK_TOKENS // BLOCK_TOKENS
PATIENCE_SECONDS = 10.0
PROMPT = prompt(NUM_CHUNKS * CHUNK_TOKENS)


class Arrivals(Meddler):
    """Counts arrived blocks; the engine's thread may wait for them."""

    def __init__(self) -> None:
        super().__init__()
        self.num_blocks = 0
        self._changed = threading.Condition()

    async def after(self, runs: Sequence[CopyRange]) -> None:
        with self._changed:
            self.num_blocks += len(runs)
            self._changed.notify_all()

    def until(self, num_blocks: int) -> bool:
        """Wait in a thread for this many blocks; False after a timeout."""
        with self._changed:
            return self._changed.wait_for(lambda: self.num_blocks >= num_blocks, PATIENCE_SECONDS)


def compute_after_arrivals(pair: Pair, arrivals: Arrivals, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record how many blocks had arrived when each chunk began."""
    runner = pair.prefill.engine._loop._runner
    launch, begun = runner.launch, list[int]()

    def held(works: Any) -> Any:
        assert arrivals.until(CHUNK_BLOCKS * len(begun)), f"chunk {len(begun)} waited in vain for the blocks before it"
        begun.append(arrivals.num_blocks)
        return launch(works)

    monkeypatch.setattr(runner, "launch", held)
    return begun


@pytest.mark.parametrize("transport", ["grpc", "local", "mooncake"])
async def test_blocks_are_pulled_while_the_next_chunk_is_computed(
    tiny: Tiny, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrivals = Arrivals()
    async with start_pair(tiny, transport, arrivals) as pair:
        begun = compute_after_arrivals(pair, arrivals, monkeypatch)
        answer = await pair.gateway.generate(PROMPT, pair.prefill.address)
        assert answer.tokens == pair.expected(PROMPT)
        assert begun == [CHUNK_BLOCKS * number for number in range(NUM_CHUNKS)]
        assert arrivals.num_blocks == CHUNK_BLOCKS * NUM_CHUNKS, "the last chunk's alone were left"


async def test_what_a_client_waits_for_beyond_the_computing_is_the_last_chunks_way(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0

    class Slow(Arrivals):
        """Every pull takes seven seconds of the receiver's clock."""

        async def before(self) -> None:
            nonlocal now
            now += 7.0

    arrivals = Slow()
    monkeypatch.setattr(remote_prefill, "time", SimpleNamespace(perf_counter=lambda: now))
    async with start_pair(tiny, meddler=arrivals) as pair:
        compute_after_arrivals(pair, arrivals, monkeypatch)
        answer = await pair.gateway.generate(PROMPT, pair.prefill.address)
        assert answer.usage is not None
        assert arrivals.num_pulls == NUM_CHUNKS
        assert answer.usage.exposed_transfer_ms == 7000


async def test_a_long_prompt_is_read_in_parts_each_with_a_time_of_its_own(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []

    class Sizes(Meddler):
        async def after(self, runs: Sequence[CopyRange]) -> None:
            sizes.append(len(runs))

    async with start_pair(tiny, meddler=Sizes()) as pair:
        monkeypatch.setattr(remote_prefill, "MAX_PULL_BYTES", int(1.5 * pair.decode.place.memory.block_bytes))
        answer = await pair.gateway.generate(PROMPT, pair.prefill.address)
        assert answer.tokens == pair.expected(PROMPT)
        assert sizes == [1] * NUM_CHUNKS * CHUNK_BLOCKS


def test_a_prompt_that_took_hours_can_be_told_of() -> None:
    clock = StageClock(3600.0 * 24)
    clock.computed(PromptCounts(num_cached_tokens=0, queue_ms=2000, compute_ms=2 * 3_600_000))
    wire = usage_to_wire(clock.with_times(PromptUsage()))
    assert (wire.routed_us, wire.prefilling_us) == (2_000_000, MAX_US)
