"""Layout of a model's KV inside a page, which peers must agree on before pages move. No torch."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import lru_cache
from hashlib import blake2b

from weft.kv.layer_groups import AttentionSpan
from weft.model.spec import ModelConfig

# [page][kv_head][layer of the group][k, v][token][dim]: one page is one contiguous run, and so is any range of its
# heads. Latent attention keeps one vector for both: one head, and k only.
KV_LAYOUT = "bhlktd-v2"
# raised by every correction after which the same weights, config and tokens have other KV, as disks keep the old one
KV_NUMERICS = 2
ITEM_BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True, slots=True)
class KvGroups:
    """Layers that look equally far back, `size` to a group, so that all pages are alike and one pool serves all.

    `places`: for each layer its group and its place there. Groups that see everything come first.
    """

    size: int
    spans: tuple[AttentionSpan, ...]
    places: tuple[tuple[int, int], ...]


@lru_cache(maxsize=64)
def kv_groups(config: ModelConfig) -> KvGroups:
    """Return the layer groups of a model."""
    layers_of: dict[AttentionSpan, list[int]] = {}
    for index, layer in enumerate(config.layers):
        layers_of.setdefault(AttentionSpan(layer.window, layer.chunk), []).append(index)
    size = group_size([len(layers) for layers in layers_of.values()])
    spans: list[AttentionSpan] = []
    places: dict[int, tuple[int, int]] = {}
    for reach in sorted(layers_of, key=lambda each: each.width > 0):
        layers = layers_of[reach]
        places.update({layer: (len(spans) + at // size, at % size) for at, layer in enumerate(layers)})
        spans += [reach] * -(-len(layers) // size)
    return KvGroups(size, tuple(spans), tuple(places[index] for index in range(config.num_layers)))


def group_heads(config: ModelConfig) -> tuple[int, ...]:
    """Return the query heads of each group's layers."""
    return tuple(config.num_heads_with(span.window) for span in kv_groups(config).spans)


def group_size(counts: Collection[int]) -> int:
    """Return the layers per group, for `counts` layers of each kind: the fewest groups with little waste.

    Places for which a kind has no layer are memory without use: a sixteenth of the layers at most, or none where a
    smaller group divides all counts.
    """

    def cost(size: int) -> tuple[int, int]:
        num_groups = sum(-(-count // size) for count in counts)
        return num_groups, num_groups * size

    fitting = [size for size in range(1, max(counts) + 1) if 16 * cost(size)[1] <= 17 * sum(counts)]
    return min(fitting, key=cost)


def layout_name(config: ModelConfig) -> str:
    """What peers compare: order and version, layers and reach of each group, and how the numbers come about: the same
    tensors have other KV with another rotation, norm or routing."""
    groups = kv_groups(config)
    names = [f"{groups.size}w{each.window}c{each.chunk}" if each.width else str(groups.size) for each in groups.spans]
    # all but limits, names and what comes behind the last layer; what is not known to be harmless counts
    rest = replace(config, max_positions=0, is_tied=False, eos_token_ids=(), dtype="", architecture="")
    rest = replace(rest, prefix="", renamed=(), ignored=())
    digest = blake2b(repr(rest).encode(), digest_size=8, person=b"weft-kv-numbers").hexdigest()
    return "/".join((KV_LAYOUT, *names, f"n{KV_NUMERICS}-{digest}"))


def block_bytes(config: ModelConfig, dtype: str, block_tokens: int) -> int:
    """Bytes of one page: `block_tokens` tokens of one group's layers; `dtype` is "float32" or "bfloat16"."""
    num_vectors = config.num_kv_heads * kv_groups(config).size * config.kv_parts * block_tokens
    return num_vectors * config.head_dim * ITEM_BYTES[dtype]
