"""The caches of a model's layers in the pages of one pool."""

from __future__ import annotations

from torch import Tensor

from weft.model.kv_layout import PlacedPlane, placed_planes
from weft.model.sharding import WHOLE, Shard
from weft.model.spec import ModelConfig
from weft_kernels.layer_cache import LayerCache, PagedPool


def paged_pool(config: ModelConfig, pages: Tensor, block_tokens: int, shard: Shard = WHOLE) -> PagedPool:
    """Return the pool of a model with its draft layers. pages: [pages, numbers of a page].

    Ranks of a group on one machine share the pages of the whole model, in which each sees its own key heads.
    """
    heads = shard.key_heads(config)
    own = slice(None) if shard.is_whole else slice(heads.start, heads.stop)
    caches = []
    for planes in placed_planes(config, block_tokens):
        views = [_view(pages, placed, block_tokens)[:, own] for placed in planes]
        caches.append(LayerCache(views[0], views[-1]))
    return PagedPool(pages, tuple(caches))


def _view(pages: Tensor, placed: PlacedPlane, block_tokens: int) -> Tensor:
    """Return a plane as [pages, heads, block_tokens, dim]."""
    plane = placed.plane
    shape = len(pages), plane.heads, block_tokens, plane.dim
    strides = pages.stride(0), placed.head_stride, plane.dim, 1
    return pages.as_strided(shape, strides, pages.storage_offset() + placed.offset)
