"""The caches of a model's layers in the pages of one pool."""

from __future__ import annotations

from torch import Tensor

from weft.model.kv_layout import kv_groups
from weft.model.spec import ModelConfig
from weft_kernels.layer_cache import PagedPool, uniform_pool


def paged_pool(config: ModelConfig, pages: Tensor, block_tokens: int) -> PagedPool:
    """Return the pool of a model. pages: [pages, items of a page]."""
    groups = kv_groups(config)
    shape = len(pages), config.num_kv_heads, groups.size, config.kv_parts, block_tokens, config.head_dim
    places = uniform_pool(pages.view(shape)).layers
    return PagedPool(pages, tuple(places[place] for _, place in groups.places))
