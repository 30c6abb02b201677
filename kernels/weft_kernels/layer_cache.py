"""Keys and values of layers in the pages of one pool, as strided views."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


class NativeCache(ctypes.Structure):
    """Memory layout of `Pool` in native/pool.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("keys", "values")),
        *((name, ctypes.c_long) for name in ("kv_heads", "block_tokens", "dim", "value_dim")),
        *((name, ctypes.c_long) for name in ("page_stride", "head_stride", "key_stride", "value_stride")),
    )


@dataclass(frozen=True)
class LayerCache:
    """One layer: `keys` and `values` [pages, kv_heads, block_tokens, dim], views of a pool.

    Their widths may differ. Pages and heads are equally far apart in both, and the numbers of a vector are neighbours.
    Latent attention keeps one vector a token: there `values` is `keys`, and the kernel reads its leading numbers.
    """

    keys: Tensor
    values: Tensor

    def __post_init__(self) -> None:
        assert self.keys.shape[:3] == self.values.shape[:3]
        assert self.keys.stride()[:2] == self.values.stride()[:2]
        assert self.keys.stride(3) == self.values.stride(3) == 1
        assert self.keys.dtype == self.values.dtype

    @cached_property
    def native(self) -> NativeCache:
        """The same for the C++ kernels."""
        keys, values = self.keys, self.values
        sizes = *keys.shape[1:], values.shape[3]
        strides = *keys.stride()[:3], values.stride(2)
        return NativeCache(keys.data_ptr(), values.data_ptr(), *sizes, *strides)

    @cached_property
    def address(self) -> int:
        """Address of `native`. It stays valid as long as this object."""
        return ctypes.addressof(self.native)


@dataclass(frozen=True)
class PagedPool:
    """`memory` [pages, ...] and the caches of all layers in it. Pages are equally far apart; all layers have one dtype
    and one number of tokens a page.
    """

    memory: Tensor
    layers: tuple[LayerCache, ...]

    @property
    def device(self) -> torch.device:
        return self.memory.device

    @property
    def dtype(self) -> torch.dtype:
        """Type of keys and values."""
        return self.layers[0].keys.dtype

    @property
    def block_tokens(self) -> int:
        return self.layers[0].keys.shape[2]

    @cached_property
    def native(self) -> ctypes.Array[NativeCache]:
        """All layers for the C++ kernels, made once: a step of a small model takes less than a millisecond."""
        return (NativeCache * len(self.layers))(*(layer.native for layer in self.layers))


def uniform_pool(memory: Tensor) -> PagedPool:
    """Return the pool of layers that are all alike.

    memory: [pages, kv_heads, layers, planes, block_tokens, dim]; the planes are keys and values, or one for both.
    """
    planes = [memory[:, :, layer].unbind(2) for layer in range(memory.shape[2])]
    return PagedPool(memory, tuple(LayerCache(each[0], each[-1]) for each in planes))
