"""Layers of unlike shapes in one pool: kernels read and write their own layer, and nothing else."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from weft_kernels.kv_write import kv_write
from weft_kernels.latent_attention import latent_attention, latent_attention_reference
from weft_kernels.layer_cache import LayerCache, PagedPool
from weft_kernels.native import CHOICE
from weft_kernels.paged_attention import FULL, KeySpan, PagedBatch, paged_attention, paged_attention_reference
from weft_kernels.rope_kv import rope_kv

NUM_PAGES, BLOCK_TOKENS = 30, 16
LATENT, WIDE, NARROW = range(3)
# Of each layer: key heads, width of keys, width of values; no values: one vector is both.
SHAPES = ((1, 80, 0), (2, 64, 32), (4, 32, 32))
# (new rows, context with them): decodes, a few rows, and chunks
SPANS = [(1, 70), (3, 9), (40, 45), (1, 3), (21, 21)]


def mixed_pool(dtype: torch.dtype) -> PagedPool:
    """A latent layer and two grouped ones, one behind the other in each page, and 24 numbers for nothing."""
    starts, sizes = [0], [heads * BLOCK_TOKENS * (keys + values) for heads, keys, values in SHAPES]
    for size in sizes:
        starts.append(starts[-1] + size)
    page = starts[-1] + 24
    memory = torch.randn(NUM_PAGES, page, generator=torch.Generator().manual_seed(5)).to(dtype)
    layers = []
    for start, (heads, keys, values) in zip(starts, SHAPES, strict=False):
        head = BLOCK_TOKENS * (keys + values)
        views = [
            memory.as_strided((NUM_PAGES, heads, BLOCK_TOKENS, dim), (page, head, dim, 1), start + offset)
            for dim, offset in ((keys, 0), (values, BLOCK_TOKENS * keys))
            if dim
        ]
        layers.append(LayerCache(views[0], views[-1]))
    return PagedPool(memory, tuple(layers))


def batch_of(pool: PagedPool, num_heads: int) -> PagedBatch:
    free = torch.randperm(NUM_PAGES, generator=torch.Generator().manual_seed(6)).tolist()
    tables = [[free.pop() for _ in range(-(-context // BLOCK_TOKENS))] for _, context in SPANS]
    starts = [sum(rows for rows, _ in SPANS[:index]) for index in range(len(SPANS) + 1)]
    return PagedBatch(pool, num_heads, starts, [context for _, context in SPANS], tables)


def queries(layer: int, num_heads: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(66, num_heads, SHAPES[layer][1], generator=torch.Generator().manual_seed(7)).to(dtype)


@pytest.fixture(params=["native", "torch"])
def _path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "torch":
        monkeypatch.setenv(CHOICE, "torch")


@pytest.mark.usefixtures("_path")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("span", [FULL, KeySpan(20)])
def test_attention_reads_its_own_layer(span: KeySpan, dtype: torch.dtype) -> None:
    pool = mixed_pool(dtype)
    batch = batch_of(pool, 4)
    rtol, atol = (1e-5, 2e-6) if dtype == torch.float32 else (2e-2, 2e-2)
    for layer in (WIDE, NARROW):
        q = queries(layer, 4, dtype)
        found = paged_attention(q, layer, batch, span)
        assert found.shape == (66, 4, SHAPES[layer][2])
        torch.testing.assert_close(found, paged_attention_reference(q, layer, batch, span), rtol=rtol, atol=atol)
    q = queries(LATENT, 4, dtype)
    found = latent_attention(q, LATENT, batch, 64, 0.2)
    torch.testing.assert_close(found, latent_attention_reference(q, LATENT, batch, 64, 0.2), rtol=rtol, atol=atol)


@pytest.mark.usefixtures("_path")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_among_others_has_the_bits_of_one_alone(dtype: torch.dtype) -> None:
    pool = mixed_pool(dtype)
    caches = pool.layers[NARROW]
    # the same numbers with no other layer between two pages
    memory = torch.cat((caches.keys, caches.values), dim=2).contiguous()
    alone = PagedPool(memory, (LayerCache(memory[:, :, :BLOCK_TOKENS], memory[:, :, BLOCK_TOKENS:]),))
    q = queries(NARROW, 8, dtype)
    assert torch.equal(paged_attention(q, NARROW, batch_of(pool, 8)), paged_attention(q, 0, batch_of(alone, 8)))


@pytest.mark.usefixtures("_path")
def test_new_rows_land_in_their_layer_alone() -> None:
    slots = torch.tensor([5 * BLOCK_TOKENS + 3, 0, 29 * BLOCK_TOKENS + 15])
    for layer, (heads, keys, values) in enumerate(SHAPES):
        pool = mixed_pool(torch.float32)
        before = pool.memory.clone()
        k = torch.randn(3, heads, keys)
        v = torch.randn(3, heads, values) if values else None
        kv_write(k, v, pool.layers[layer], slots)
        for row, slot in enumerate(slots.tolist()):
            page, token = divmod(slot, BLOCK_TOKENS)
            assert torch.equal(pool.layers[layer].keys[page, :, token], k[row])
            if v is not None:
                assert torch.equal(pool.layers[layer].values[page, :, token], v[row])
        assert (pool.memory != before).sum() == 3 * heads * (keys + values)


@pytest.mark.usefixtures("_path")
def test_rotated_rows_land_in_their_layer_alone() -> None:
    pool, slots = mixed_pool(torch.float32), torch.tensor([70, 2])
    before, qkv = pool.memory.clone(), torch.randn(2, 4 + 2 * 4, 32)
    cos, sin = torch.ones(2, 32), torch.zeros(2, 32)
    q = rope_kv(qkv.clone(), cos, sin, pool.layers[NARROW], slots)
    assert torch.equal(q, qkv[:, :4])
    for row, slot in enumerate(slots.tolist()):
        page, token = divmod(slot, BLOCK_TOKENS)
        assert torch.equal(pool.layers[NARROW].keys[page, :, token], qkv[row, 4:8])
        assert torch.equal(pool.layers[NARROW].values[page, :, token], qkv[row, 8:])
    assert (pool.memory != before).sum() == 2 * 2 * 4 * 32


def test_triton_kernels_take_the_strides_of_each_plane() -> None:
    pytest.importorskip("triton")
    from tests.kernels.device import DEVICE, close
    from weft_kernels.paged_attention.kernel import paged_attention_kernels

    pool = mixed_pool(torch.float32)
    memory = pool.memory.to(DEVICE)

    def moved(view: Tensor) -> Tensor:
        return memory.as_strided(view.shape, view.stride(), view.storage_offset())

    layers = tuple(LayerCache(moved(each.keys), moved(each.values)) for each in pool.layers)
    batch = batch_of(PagedPool(memory, layers), 4)
    for layer in (WIDE, NARROW):
        q = queries(layer, 4, torch.float32)
        found = paged_attention_kernels(q.to(DEVICE), layer, batch, FULL, SHAPES[layer][1] ** -0.5)
        close(found.cpu(), paged_attention_reference(q, layer, batch_of(pool, 4)))
