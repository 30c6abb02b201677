"""Writes new keys and values into pool blocks."""

from __future__ import annotations

from torch import Tensor

from weft_kernels.native import native


def kv_write(k: Tensor, v: Tensor | None, pool: Tensor, layer: int, slots: Tensor) -> None:
    """pool[slots[t] // block_tokens, h, layer, 0 or 1, slots[t] % block_tokens] = k[t, h] or v[t, h], in place.

    k, v: [T, kv_heads, dim]. pool: [blocks, kv_heads, layers, 2, block_tokens, dim], or 1 for the 2 and no v.
    slots: [T] int64, all different.
    """
    library = None if k.is_cuda else native()
    if library is None or any(each is not None and each.stride()[1:] != (each.shape[2], 1) for each in (k, v)):
        return kv_write_reference(k, v, pool, layer, slots)
    _, heads, layers, parts, block_tokens, dim = pool.shape
    for part, new in enumerate((k, v)):
        if new is not None:
            assert new.dtype == pool.dtype
            sizes = len(new), heads, dim * new.itemsize, new.stride(0) * new.itemsize
            places = layers * parts, layer * parts + part, block_tokens
            library.weft_kv_write(new.data_ptr(), pool.data_ptr(), slots.data_ptr(), *sizes, *places)


def kv_write_reference(k: Tensor, v: Tensor | None, pool: Tensor, layer: int, slots: Tensor) -> None:
    block_tokens = pool.shape[4]
    blocks, offsets = slots // block_tokens, slots % block_tokens
    pool[:, :, layer, 0][blocks, :, offsets] = k
    if v is not None:
        pool[:, :, layer, 1][blocks, :, offsets] = v
