"""Prompts of sliding-window models that continue from the store."""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any, cast

import pytest

from tests.services.attach import new_key
from tests.weft.engine.harness import Driver
from tests.weft.tiny_families import TinyFamily, make_family
from weft.engine.messages import Reserved
from weft.kv.block_pool import Tier, block_keys, page_key
from weft.kv.layer_groups import PagingPolicy
from weft.worker.engine_client import StatsRecorder
from weft.worker.store_client import StoreClient, StoreHit, StorePrefix
from weft.worker.store_reader import FetchRequest, FetchResult

LIMITS: dict[str, Any] = {"block_tokens": 4, "chunk_tokens": 16, "num_blocks": 256}
NAMES = ["mistral-window", "qwen2-window", "llama4"]
PROMPT = [(5 * i * i + 3 * i) % 110 + 3 for i in range(57)]


class PageStore:
    """Pages by key, and the keys that were requested."""

    is_connected = True

    def __init__(self, pages: dict[bytes, bytes]) -> None:
        self.pages = pages
        self.target: Driver | None = None
        self.num_fetched = 0

    async def find(self, keys: Sequence[bytes], stall_seconds: float) -> set[bytes]:
        return self.pages.keys() & set(keys)

    async def fetch(self, wanted: FetchRequest, stall_seconds: float) -> FetchResult:
        assert self.target is not None
        memory = self.target.engine.pool_memory
        keys = list(takewhile(self.pages.__contains__, wanted.keys))
        for key, block in zip(keys, wanted.blocks, strict=False):
            ctypes.memmove(memory.address + block * memory.block_bytes, self.pages[key], memory.block_bytes)
        self.num_fetched += len(keys)
        return FetchResult(len(keys), {Tier.DRAM: len(keys)})


def sealed_pages(driver: Driver) -> dict[bytes, bytes]:
    """Collect the pages that a store would receive."""
    memory = driver.engine.pool_memory
    return {
        sealed.block_key: ctypes.string_at(memory.address + sealed.block * memory.block_bytes, memory.block_bytes)
        for sealed in driver.sealed
    }


def first_turn(tiny: TinyFamily) -> tuple[list[int], dict[bytes, bytes], PagingPolicy]:
    """Run a prompt with its answer; return the offered pages."""
    with Driver(tiny, **LIMITS, pin_sealed=True, max_pinned=1000) as driver:
        answer = driver.generate(PROMPT, 30).tokens
        assert answer == tiny.greedy(PROMPT, 30)
        return PROMPT + answer, sealed_pages(driver), driver.engine.paging


def fetched(store: PageStore, driver: Driver, tokens: list[int], reserved: Reserved) -> StoreHit:
    """Return what the store adds."""
    store.target = driver
    tally = StatsRecorder()
    prefix = StorePrefix(cast("StoreClient", store), driver.engine.paging, tally)
    hit = asyncio.run(prefix.fetch(tokens, b"", reserved))
    counted = tally.read().prefix
    assert counted.pool_tokens + counted.dram_tokens + counted.nvme_tokens == reserved.num_hit_tokens + hit.num_tokens
    return hit


@pytest.mark.parametrize("name", NAMES)
def test_pages_out_of_sight_at_the_prompts_end_are_not_offered(name: str, tmp_path: Path) -> None:
    text, pages, paging = first_turn(make_family(name, tmp_path))
    keys = block_keys(text[:-1], 4)
    for group in range(len(paging.spans)):
        offered = [index for index, key in enumerate(keys) if page_key(key, group) in pages]
        assert offered == [*range(paging.first(group, len(PROMPT) // 4 * 4), len(keys))]


@pytest.mark.parametrize("num_own", [0, 9, 57])
@pytest.mark.parametrize("name", NAMES)
def test_a_second_turn_goes_on_from_the_store(name: str, num_own: int, tmp_path: Path) -> None:
    tiny = make_family(name, tmp_path)
    text, pages, paging = first_turn(tiny)
    follow_up = [*text, 5, 6, 7, 8, 9]
    store = PageStore(pages)
    with Driver(tiny, **LIMITS) as driver:
        if num_own:
            driver.generate(PROMPT[:num_own], 1, "own")
        key = driver.submit("two", follow_up, 20, wait_for_kv=True)
        reserved = driver.wait_reserved(key)
        assert reserved.num_hit_tokens == num_own // 4 * 4
        num_found = fetched(store, driver, follow_up, reserved).num_tokens
        # the last token of the answer has no KV
        assert reserved.num_hit_tokens + num_found == (len(text) - 1) // 4 * 4
        num_kept = (len(text) - 1) // 4 * 4
        lent = [paging.needed_blocks(group, num_own // 4, num_kept, len(text)) for group in range(len(paging.spans))]
        assert store.num_fetched == sum(map(len, lent))
        driver.engine.complete_kv(key, reserved.num_hit_tokens + num_found)
        assert driver.wait_end(key).tokens == tiny.greedy(follow_up, 20)
        driver.assert_all_blocks_are_back()


def test_a_prefix_of_which_a_window_is_lacking_is_not_taken(tmp_path: Path) -> None:
    tiny = make_family("llama4", tmp_path)
    text, pages, _ = first_turn(tiny)
    follow_up = [*text, 5, 6, 7]
    store = PageStore({key: page for key, page in pages.items() if len(key) == 32})
    with Driver(tiny, **LIMITS) as driver:
        key = driver.submit(new_key().request_id, follow_up, 10, wait_for_kv=True)
        num_found = fetched(store, driver, follow_up, driver.wait_reserved(key)).num_tokens
        # 80 tokens end with a chunk: nothing of the chunked layers is looked at from there
        assert num_found == 80
        driver.engine.complete_kv(key, num_found)
        assert driver.wait_end(key).tokens == tiny.greedy(follow_up, 10)
