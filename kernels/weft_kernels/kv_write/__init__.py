"""Writes new keys and values into the pages of a layer."""

from __future__ import annotations

import ctypes

from torch import Tensor

from weft_kernels.layer_cache import LayerCache
from weft_kernels.native import native


def kv_write(k: Tensor, v: Tensor | None, cache: LayerCache, slots: Tensor) -> None:
    """cache.keys[slots[t] // block_tokens, h, slots[t] % block_tokens] = k[t, h], and values alike, in place.

    k, v: [T, kv_heads, dim]; no v if the layer keeps one vector for both. slots: [T] int64, all different.
    """
    library = None if k.is_cuda else native()
    if library is None or any(each is not None and each.stride()[1:] != (each.shape[2], 1) for each in (k, v)):
        return kv_write_reference(k, v, cache, slots)
    for new, plane in ((k, cache.keys), (v, cache.values)):
        if new is not None:
            assert new.dtype == plane.dtype
            _, heads, block_tokens, dim = plane.shape
            sizes = len(new), heads, dim * new.itemsize, new.stride(0) * new.itemsize, block_tokens
            strides = (ctypes.c_long * 3)(*(each * plane.itemsize for each in plane.stride()[:3]))
            library.weft_kv_write(new.data_ptr(), plane.data_ptr(), slots.data_ptr(), *sizes, strides)


def kv_write_reference(k: Tensor, v: Tensor | None, cache: LayerCache, slots: Tensor) -> None:
    block_tokens = cache.keys.shape[2]
    blocks, offsets = slots // block_tokens, slots % block_tokens
    cache.keys[blocks, :, offsets] = k
    if v is not None:
        cache.values[blocks, :, offsets] = v
