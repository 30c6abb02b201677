"""Attention over one vector a token gives what the reference defines, and what two vectors would give."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.test_paged_attention import BATCHES, make_batch
from weft_kernels.latent_attention import latent_attention, latent_attention_reference
from weft_kernels.layer_cache import uniform_pool
from weft_kernels.paged_attention import PagedBatch

SCALE = 0.3


def make_latent(spans: list[tuple[int, int]], dtype: torch.dtype) -> tuple[torch.Tensor, PagedBatch]:
    """Three heads, vectors of 10."""
    q, batch = make_batch(spans, (3, 1), 10, dtype)
    pool = batch.pool.memory[:, :, :, :1].contiguous()
    return q, PagedBatch(uniform_pool(pool), 3, batch.query_starts, batch.context_lens, batch.block_tables)


@pytest.mark.parametrize("spans", BATCHES.values(), ids=BATCHES)
def test_grouped_latent_attention_is_the_reference_in_fp32(spans: list[tuple[int, int]]) -> None:
    q, batch = make_latent(spans, torch.float32)
    for layer in range(2):
        torch.testing.assert_close(
            latent_attention(q, layer, batch, 7, SCALE),
            latent_attention_reference(q, layer, batch, 7, SCALE),
            rtol=1e-5,
            atol=1e-6,
        )


def test_grouped_latent_attention_is_the_reference_in_bf16() -> None:
    q, batch = make_latent(BATCHES["decodes and chunks"], torch.bfloat16)
    torch.testing.assert_close(
        latent_attention(q, 1, batch, 8, SCALE), latent_attention_reference(q, 1, batch, 8, SCALE), rtol=2e-2, atol=2e-2
    )
