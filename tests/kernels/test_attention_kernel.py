"""A packed batch through the attention kernels gives what the references define."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.kernels.device import DEVICE, close
from tests.kernels.test_paged_attention import BATCHES, hide, make_batch
from weft_kernels.latent_attention import latent_attention_reference
from weft_kernels.layer_cache import uniform_pool
from weft_kernels.paged_attention import FULL, KeySpan, PagedBatch, paged_attention, paged_attention_reference

pytest.importorskip("triton")

from weft_kernels.paged_attention.device_batch import plan_launches, resident_batch
from weft_kernels.paged_attention.kernel import paged_attention_kernels


def on_device(batch: PagedBatch) -> PagedBatch:
    return replace(batch, pool=uniform_pool(batch.pool.memory.to(DEVICE)))


@pytest.mark.parametrize("span", [FULL, KeySpan(window=6), KeySpan(chunk=8)], ids=["full", "window", "chunk"])
@pytest.mark.parametrize("spans", [BATCHES["decodes and chunks"], [(1, 30), (12, 20), (2, 9)]])
def test_batches_of_all_kinds(spans: list[tuple[int, int]], span: KeySpan) -> None:
    q, batch = make_batch(spans, (6, 2), 10, torch.float32)
    moved = on_device(batch)
    for layer in range(2):
        found = paged_attention_kernels(q.to(DEVICE), layer, moved, span, 10**-0.5)
        close(found.cpu(), paged_attention_reference(q, layer, batch, span))


@pytest.mark.parametrize("span", [FULL, KeySpan(window=6), KeySpan(chunk=8)], ids=["full", "window", "chunk"])
def test_kernels_hide_slots_below_first(span: KeySpan) -> None:
    q, batch = make_batch([(1, 30), (12, 20), (2, 9)], (6, 2), 10, torch.float32)
    batch = hide(batch, 0.8)
    found = paged_attention_kernels(q.to(DEVICE), 1, on_device(batch), span, 10**-0.5)
    close(found.cpu(), paged_attention_reference(q, 1, batch, span))


@pytest.mark.parametrize("num_rows", [1, 2, 8])
def test_resident_batch_hides_slots_below_first(num_rows: int) -> None:
    q, batch = make_batch([(num_rows, 30), (num_rows, 11), (num_rows, 17)], (4, 2), 16, torch.float32)
    batch = hide(batch, 0.8)
    lists = batch.query_starts, batch.context_lens, batch.block_tables
    tensors = plan_launches(*lists, torch.device(DEVICE), batch.first).decode
    assert tensors is not None
    resident = resident_batch(on_device(batch).pool, 4, tensors)
    close(paged_attention(q.to(DEVICE), 1, resident).cpu(), paged_attention_reference(q, 1, batch))
    close(paged_attention_kernels(q.to(DEVICE), 1, resident, FULL, 0.25).cpu(), paged_attention_reference(q, 1, batch))


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
