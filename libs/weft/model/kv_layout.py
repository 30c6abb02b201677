"""Layout of a model's KV inside a page, which peers must agree on before pages move. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from hashlib import blake2b
from itertools import accumulate, pairwise

from weft.kv.layer_groups import AttentionSpan, Unit
from weft.model.spec import LayerSpec, ModelConfig, Plane

# [page][kv_head][layer of the group][plane][token][dim]: one page is one contiguous run, and so is any range of its
# heads. Layers with another head count than their group's stand whole before the first head.
KV_LAYOUT = "bhlptd-v3"
# raised by every correction after which the same weights, config and tokens have other KV, as disks keep the old one
KV_NUMERICS = 2
ITEM_BYTES = {"float32": 4, "bfloat16": 2}
# Context at which groups of models with unlike layers are compared: those with a window count their window.
REFERENCE_TOKENS = 8192


@dataclass(frozen=True, slots=True)
class KvGroup:
    """Layers that look equally far back. A page holds the KV of a block of tokens for all of them.

    `layers`: their indices; draft layers count on behind the model's. `heads`: key heads that ranks share.
    """

    span: AttentionSpan
    layers: tuple[int, ...]
    heads: int


@dataclass(frozen=True, slots=True)
class KvGroups:
    """All groups. Those that see everything come first. `group_of`: the group of each layer."""

    groups: tuple[KvGroup, ...]
    group_of: tuple[int, ...]

    @property
    def spans(self) -> tuple[AttentionSpan, ...]:
        """The span of each group."""
        return tuple(group.span for group in self.groups)


@dataclass(frozen=True, slots=True)
class PlacedPlane:
    """A plane of `layer` in a page: token t of head h begins `offset` + h * `head_stride` + t * dim numbers into it."""

    layer: int
    plane: Plane
    offset: int
    head_stride: int


@lru_cache(maxsize=64)
def kv_groups(config: ModelConfig) -> KvGroups:
    """Return the layer groups of a model."""
    layers = config.kv_layers
    kinds: dict[AttentionSpan, list[int]] = {}
    for index, layer in enumerate(layers):
        kinds.setdefault(AttentionSpan(layer.window, layer.chunk), []).append(index)
    spans = sorted(kinds, key=lambda each: each.width > 0)
    sizes = [(_reference(span), [token_numbers(config, layers[index]) for index in kinds[span]]) for span in spans]
    size = page_size(sizes)
    groups = [
        KvGroup(span, found, _shared_heads(config, [layers[index] for index in found]))
        for span, (_, numbers) in zip(spans, sizes, strict=True)
        for found in _taken(kinds[span], _packed(numbers, size))
    ]
    group_of = {layer: index for index, group in enumerate(groups) for layer in group.layers}
    return KvGroups(tuple(groups), tuple(group_of[index] for index in range(len(layers))))


def draft_group(config: ModelConfig) -> int | None:
    """Return the group of the draft layers; None without any."""
    return kv_groups(config).group_of[-1] if config.drafts else None


def group_heads(config: ModelConfig) -> tuple[int, ...]:
    """Return the query heads of each group's layers."""
    return tuple(config.num_heads_with(span.window) for span in kv_groups(config).spans)


def page_size(kinds: Sequence[tuple[int, Sequence[int]]]) -> int:
    """Return the numbers of one token in a page, for layers of several kinds.

    kinds: for each the tokens that it keeps of a reference context, and the numbers of a token in each of its layers.

    Numbers for which a group has no layer are memory without use. Of sizes that waste a sixteenth at most, the one with
    the fewest groups is taken. Where none does, as layers are too unlike, it is the one with the least memory for the
    reference context.
    """
    layers = sum(sum(sizes) for _, sizes in kinds)

    def cost(size: int) -> tuple[int, int, int]:
        counts = [len(_packed(sizes, size)) for _, sizes in kinds]
        taken = size * sum(counts)
        kept = size * sum(count * tokens for count, (tokens, _) in zip(counts, kinds, strict=True))
        return 0 if 16 * taken <= 17 * layers else kept, sum(counts), taken

    largest = max(max(sizes) for _, sizes in kinds)
    runs = {end - start for _, sizes in kinds for start, end in _sums(sizes)}
    return min((size for size in sorted(runs) if size >= largest), key=cost)


def token_numbers(config: ModelConfig, layer: LayerSpec, tp: int = 1) -> int:
    """Return the numbers that a layer keeps of a token, on each of `tp` ranks."""
    return sum(-(-plane.heads // tp) * plane.dim for plane in config.planes_of(layer))


def page_numbers(config: ModelConfig, tp: int = 1) -> int:
    """Return the numbers of one token in a page, that of the largest group; with `tp` ranks, on the first of them."""
    layers = config.kv_layers

    def share(group: KvGroup, layer: LayerSpec) -> int:
        return token_numbers(config, layer, tp if _heads(config, layer) == group.heads else 1)

    groups = kv_groups(config).groups
    return max(sum(share(group, layers[index]) for index in group.layers) for group in groups)


def block_bytes(config: ModelConfig, dtype: str, block_tokens: int) -> int:
    """Bytes of one page, the same for all groups; `dtype` is "float32" or "bfloat16"."""
    return page_numbers(config) * block_tokens * ITEM_BYTES[dtype]


@lru_cache(maxsize=64)
def placed_planes(config: ModelConfig, block_tokens: int) -> tuple[tuple[PlacedPlane, ...], ...]:
    """Return where the planes of each layer lie in the pages of the layer's group."""
    layers = config.kv_layers
    found: dict[int, tuple[PlacedPlane, ...]] = {}
    for group in kv_groups(config).groups:
        whole = [[index] for index in group.layers if _heads(config, layers[index]) != group.heads]
        shared = [index for index in group.layers if [index] not in whole]
        start = 0
        for run in (*whole, shared):
            planes = [(index, plane) for index in run for plane in config.planes_of(layers[index])]
            ends = list(accumulate((plane.dim * block_tokens for _, plane in planes), initial=0))
            placed = [
                PlacedPlane(index, plane, start + at, ends[-1])
                for (index, plane), at in zip(planes, ends, strict=False)
            ]
            found |= {index: tuple(each for each in placed if each.layer == index) for index in run}
            start += ends[-1] * _heads(config, layers[run[0]])
    return tuple(found[index] for index in range(len(layers)))


def units(config: ModelConfig, group: int, dtype: str, block_tokens: int) -> tuple[Unit, ...]:
    """Return the parts of a group's page that are hashed one by one: every head, and what stands before the first.

    A unit is one run of bytes, and ranks hold whole units. Units of one layer and head would cost up to 2.5 times the
    hash of a page: 96 KiB are 48 of them.
    """
    groups, item = kv_groups(config).groups, ITEM_BYTES[dtype]
    first = sum(each.heads + 1 for each in groups[:group])
    placed = [each for index in groups[group].layers for each in placed_planes(config, block_tokens)[index]]
    shared = [each for each in placed if each.plane.heads == groups[group].heads]
    start, size = min(each.offset for each in shared) * item, shared[0].head_stride * item
    heads = [Unit(start + head * size, size, first + head) for head in range(groups[group].heads)]
    return (Unit(0, start, first + groups[group].heads), *heads) if start else tuple(heads)


def layout_name(config: ModelConfig) -> str:
    """What peers compare: order and version, span and layers of each group, and how the numbers come about.

    The same tensors have other KV with another rotation, norm or routing. All planes are of the fingerprint's dtype.
    """
    names = [_group_name(config, group) for group in kv_groups(config).groups]
    # all but limits, names and what comes behind the last layer; what is not known to be harmless counts
    rest = replace(config, max_positions=0, is_tied=False, eos_token_ids=(), dtype="", architecture="")
    rest = replace(rest, prefix="", renamed=(), ignored=())
    digest = blake2b(repr(rest).encode(), digest_size=8, person=b"weft-kv-numbers").hexdigest()
    return "/".join((KV_LAYOUT, *names, f"n{KV_NUMERICS}-{digest}"))


def _group_name(config: ModelConfig, group: KvGroup) -> str:
    """Return runs of equal layers with their planes, such as 32xk8x128+v8x128, and the span if there is one."""
    layers = config.kv_layers
    runs: list[tuple[tuple[Plane, ...], int]] = []
    for index in group.layers:
        planes = config.planes_of(layers[index])
        if runs and runs[-1][0] == planes:
            runs[-1] = planes, runs[-1][1] + 1
        else:
            runs.append((planes, 1))
    each = [f"{count}x" + "+".join(f"{p.name}{p.heads}x{p.dim}" for p in planes) for planes, count in runs]
    span = f"w{group.span.window}c{group.span.chunk}" if group.span.width else ""
    return ",".join(each) + span


def _reference(span: AttentionSpan) -> int:
    return min(span.width or REFERENCE_TOKENS, REFERENCE_TOKENS)


def _heads(config: ModelConfig, layer: LayerSpec) -> int:
    return config.planes_of(layer)[0].heads


def _shared_heads(config: ModelConfig, layers: Sequence[LayerSpec]) -> int:
    """Return the head count of the layers with the most numbers."""
    totals: dict[int, int] = {}
    for layer in layers:
        heads = _heads(config, layer)
        totals[heads] = totals.get(heads, 0) + token_numbers(config, layer)
    return max(totals, key=lambda heads: totals[heads])


def _packed(sizes: Sequence[int], size: int) -> list[int]:
    """Return how many layers each group takes, in order, if each has room for `size` numbers."""
    counts, free = [], 0
    for each in sizes:
        if each > free:
            counts.append(0)
            free = size
        counts[-1] += 1
        free -= each
    return counts


def _taken(layers: Sequence[int], counts: Sequence[int]) -> Iterator[tuple[int, ...]]:
    ends = list(accumulate(counts, initial=0))
    return (tuple(layers[start:end]) for start, end in pairwise(ends))


def _sums(sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Return the sums before and behind each run of neighbouring layers."""
    ends = list(accumulate(sizes, initial=0))
    return ((ends[first], ends[last]) for last in range(1, len(ends)) for first in range(last))
