"""Where the KV of layers of any shape lies in pages."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weft.model.config import read_config
from weft.model.kv_layout import (
    block_bytes,
    kv_groups,
    layout_name,
    page_numbers,
    page_size,
    placed_planes,
    token_numbers,
    units,
)
from weft.model.paged_pool import paged_pool
from weft.model.spec import LayerSpec, ModelConfig, Plane

CONFIGS = Path(__file__).parent / "configs"
LLAMA, KIMI = (read_config(CONFIGS / name) for name in ("llama3-8b", "kimi-k2.5"))
GQA = (Plane("k", 8, 128), Plane("v", 8, 128))


@st.composite
def planes(draw: st.DrawFn) -> tuple[Plane, ...]:
    heads = draw(st.sampled_from((1, 2, 4)))
    names = draw(st.sampled_from((("c",), ("k", "v"))))
    return tuple(Plane(name, heads, draw(st.sampled_from((8, 16, 24)))) for name in names)


@st.composite
def models(draw: st.DrawFn) -> ModelConfig:
    shapes = draw(st.lists(planes(), min_size=1, max_size=3))
    windows = st.sampled_from((0, 0, 64))
    layers = [LayerSpec(draw(windows), planes=draw(st.sampled_from(shapes))) for _ in range(draw(st.integers(1, 9)))]
    cut = draw(st.integers(1, len(layers)))
    return replace(LLAMA, layers=tuple(layers[:cut]), drafts=tuple(layers[cut:]))


@given(models(), st.sampled_from((1, 4, 16)))
def test_no_two_planes_overlap_and_all_lie_inside(config: ModelConfig, block_tokens: int) -> None:
    size = page_numbers(config) * block_tokens
    seen_units: set[int] = set()
    assert block_bytes(config, "bfloat16", block_tokens) == 2 * size
    for index, group in enumerate(kv_groups(config).groups):
        taken = np.zeros(size, dtype=np.int64)
        heads = np.full(size, -1)
        for layer in group.layers:
            for placed in placed_planes(config, block_tokens)[layer]:
                for head in range(placed.plane.heads):
                    start = placed.offset + head * placed.head_stride
                    end = start + block_tokens * placed.plane.dim
                    assert 0 <= start < end <= size
                    taken[start:end] += 1
                    heads[start:end] = head if placed.plane.heads == group.heads else group.heads
        assert taken.max() == 1
        found = units(config, index, "bfloat16", block_tokens)
        # Each unit is one run with all of one head and nothing else; together they are the page's content.
        assert sum(unit.size for unit in found) == 2 * taken.sum()
        assert all(len(set(heads[unit.offset // 2 : (unit.offset + unit.size) // 2])) == 1 for unit in found)
        assert not seen_units & {unit.number for unit in found}
        seen_units |= {unit.number for unit in found}


@given(models())
def test_caches_are_separate_views_of_one_pool(config: ModelConfig) -> None:
    pages = torch.zeros(3, page_numbers(config) * 4)
    pool = paged_pool(config, pages, 4)
    for group in kv_groups(config).groups:
        pages.zero_()
        count = 0
        for layer in group.layers:
            for plane in (pool.layers[layer].keys, pool.layers[layer].values)[: len(placed_planes(config, 4)[layer])]:
                plane += 1
                count += plane.numel()
        assert pages.max() == 1
        assert pages.sum() == count


def test_one_shape_of_layers_keeps_pages_of_whole_layers() -> None:
    for counts, expected in (([32], 32), ([12, 36], 12), ([1, 2], 1), ([23, 25], 25), ([10, 52], 13)):
        # 23 and 25 layers in two groups of 25: two places in fifty for nothing
        for numbers in (1, 2048):
            kinds = [(8192 if index else 1024, [numbers] * count) for index, count in enumerate(counts)]
            assert page_size(kinds) == expected * numbers


def test_unlike_layers_share_pages_without_waste() -> None:
    # Gemma 4 31B: 50 layers with a window of 16 heads x 256, and 10 that see everything of 4 heads x 512
    local = tuple(Plane(name, 16, 256) for name in "kv")
    full = tuple(Plane(name, 4, 512) for name in "kv")
    layers = [LayerSpec(0 if index % 6 == 5 else 1024, planes=full if index % 6 == 5 else local) for index in range(60)]
    config = replace(LLAMA, layers=tuple(layers))
    groups = kv_groups(config).groups
    assert [len(group.layers) for group in groups] == [10, *[5] * 10]
    assert [group.heads for group in groups] == [4, *[16] * 10]
    assert page_numbers(config) == 40_960


def test_page_size_spares_memory_of_long_contexts_when_all_sizes_waste() -> None:
    # One layer of 10 that sees everything, five of 7 that keep 512 tokens: pages of 35 would waste most.
    assert page_size([(8192, [10]), (512, [7] * 5)]) == 10


def test_draft_layer_of_another_shape_stands_before_the_first_head() -> None:
    config = replace(KIMI, drafts=(LayerSpec(planes=GQA),))
    (group,) = kv_groups(config).groups
    assert (group.heads, group.layers[-1]) == (1, 61)
    draft = placed_planes(config, 64)[61]
    assert [each.offset for each in draft] == [0, 128 * 64]
    assert page_numbers(config) == page_numbers(KIMI) + 2048
    assert token_numbers(config, config.drafts[0], tp=4) == 512
    # A rank holds a share of the draft only if the group's heads are shared; a latent is whole on every rank.
    assert page_numbers(config, tp=4) == page_numbers(config)


def test_layout_name_spells_groups_and_planes() -> None:
    assert layout_name(LLAMA).startswith("bhlptd-v3/32xk8x128+v8x128/n")
    mixed = replace(KIMI, drafts=(LayerSpec(planes=GQA),))
    assert layout_name(mixed).startswith("bhlptd-v3/61xc1x576,1xk8x128+v8x128/n")
    window = replace(LLAMA, layers=(LayerSpec(), LayerSpec(window=64)))
    assert layout_name(window).split("/")[1:3] == ["1xk8x128+v8x128", "1xk8x128+v8x128w64c0"]
    assert layout_name(mixed) != layout_name(KIMI)


@pytest.mark.parametrize("name", ["llama3-8b", "kimi-k2.5", "llama4-scout"])
def test_ranks_of_one_shape_divide_the_page_by_its_heads(name: str) -> None:
    config = read_config(CONFIGS / name)
    heads = config.num_kv_heads
    assert page_numbers(config, tp=2) == page_numbers(config) // (2 if heads > 1 else 1)
