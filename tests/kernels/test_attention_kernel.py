"""A packed batch through the attention kernels gives what the references define."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.device import DEVICE, close
from tests.kernels.test_paged_attention import BATCHES, make_batch
from weft_kernels.latent_attention import latent_attention_reference
from weft_kernels.layer_cache import uniform_pool
from weft_kernels.paged_attention import FULL, KeySpan, PagedBatch, paged_attention, paged_attention_reference

pytest.importorskip("triton")

from weft_kernels.paged_attention.kernel import paged_attention_kernels


def on_device(batch: PagedBatch) -> PagedBatch:
    lists = batch.query_starts, batch.context_lens, batch.block_tables
    return PagedBatch(uniform_pool(batch.pool.memory.to(DEVICE)), batch.num_heads, *lists)


@pytest.mark.parametrize("span", [FULL, KeySpan(window=6), KeySpan(chunk=8)], ids=["full", "window", "chunk"])
@pytest.mark.parametrize("spans", [BATCHES["decodes and chunks"], [(1, 30), (12, 20), (2, 9)]])
def test_batches_of_all_kinds(spans: list[tuple[int, int]], span: KeySpan) -> None:
    q, batch = make_batch(spans, (6, 2), 10, torch.float32)
    moved = on_device(batch)
    for layer in range(2):
        found = paged_attention_kernels(q.to(DEVICE), layer, moved, span, 10**-0.5)
        close(found.cpu(), paged_attention_reference(q, layer, batch, span))


def test_latent_batches() -> None:
    generator = torch.Generator().manual_seed(1)
    pool = torch.randn(12, 1, 2, 1, 4, 24, generator=generator)
    batch = PagedBatch(uniform_pool(pool), 5, [0, 1, 10], [7, 13], [[3, 1], [0, 5, 2, 9]])
    q = torch.randn(10, 5, 24, generator=generator)
    found = paged_attention_kernels(q.to(DEVICE), 1, on_device(batch), FULL, 0.3, 16)
    close(found.cpu(), latent_attention_reference(q, 1, batch, 16, 0.3))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_public_function_takes_the_kernels_on_a_gpu(dtype: torch.dtype) -> None:
    q, batch = make_batch([(1, 17), (1, 3), (6, 6), (30, 42), (1, 5)], (8, 2), 128, dtype)
    moved = on_device(batch)
    close(paged_attention(q.to(DEVICE), 1, moved).cpu(), paged_attention_reference(q, 1, batch))
    assert "launches" in vars(moved)
