"""Prompts that continue from a store with pages that lack the KV of the draft layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.services.prefill.test_windows import PageStore, fetched, sealed_pages
from tests.weft.engine.harness import Driver
from tests.weft.engine.tiny_heads import MixedSpeculator, SlowTwin, assert_drafts_are_those_of, with_head
from tests.weft.tiny_families import make_family
from weft.kv.block_pool import block_keys, page_key, plain_key

LIMITS: dict[str, Any] = {"block_tokens": 4, "chunk_tokens": 16, "num_blocks": 256}
PROMPT = [(5 * i * i + 3 * i) % 90 + 3 for i in range(30)]


@pytest.mark.parametrize("name", ["deepseek", "llama4", "mistral-window"])
def test_second_turn_takes_bare_pages_where_no_others_are_stored(name: str, tmp_path: Path) -> None:
    """Plain pages follow bare ones and the other way round; the head sees only what is behind the last bare one."""
    tiny, make_head = with_head(make_family(name, tmp_path))
    first, second = MixedSpeculator({}, share_bare=0.5), MixedSpeculator({})
    with Driver(tiny, speculator=first, make_head=make_head, **LIMITS, pin_sealed=True, max_pinned=1000) as driver:
        text = PROMPT + driver.generate(PROMPT, 40).tokens
        assert text == PROMPT + tiny.greedy(PROMPT, 40)
        pages, paging = sealed_pages(driver), driver.engine.paging
    assert {plain_key(key) == key for key in pages} == {True, False}
    follow_up = [*text, 5, 6, 7, 8, 9]
    with Driver(tiny, speculator=second, make_head=make_head, **LIMITS) as driver:
        key = driver.submit("two", follow_up, 20, wait_for_kv=True)
        reserved = driver.wait_reserved(key)
        hit = fetched(PageStore(pages), driver, follow_up, reserved)
        driver.engine.complete_kv(key, hit.num_tokens, num_bare_tokens=hit.num_bare_tokens)
        assert driver.wait_end(key).tokens == tiny.greedy(follow_up, 20)
        driver.assert_all_blocks_are_back()
    assert hit.num_tokens == (len(text) - 1) // 4 * 4
    assert paging.draft_group is not None
    needed = paging.needed_blocks(paging.draft_group, 0, hit.num_tokens, hit.num_tokens + 1)
    names = [page_key(key, paging.draft_group) for key in block_keys(text, 4)]
    assert hit.num_bare_tokens == max((4 * index + 4 for index in needed if names[index] not in pages), default=0)
    assert {each.num_bare for each in second.drafted} & {hit.num_bare_tokens, hit.num_bare_tokens + 1}
    assert_drafts_are_those_of(SlowTwin(tiny, make_head), second.drafted, 5)
