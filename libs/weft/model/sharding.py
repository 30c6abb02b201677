"""Divides a model over the ranks of a group: which heads, experts and parts of tensors each rank holds. No torch.

Matrices that make heads or an MLP's middle are cut by rows, those that read them by columns, so each rank has a partial
result and one sum makes it whole. Attention divides by key heads; ranks that outnumber them hold the same key heads.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from math import lcm

from weft.errors import BadCheckpoint, WeftError
from weft.kv.layer_groups import head_range
from weft.model.quantization import full_block, is_packed
from weft.model.spec import INT4_KERNELS, Experts, HeadNorm, LayerSpec, ModelConfig, Quantization
from weft.model.tensors import expected_tensors, model_tensors, stored_name

INT4_WORD = 8  # weights of a row that share a word
_EXPERT = re.compile(r"\.experts\.(\d+)\.")


class BadPlan(WeftError):
    """An impossible layout; the message names the option."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Degrees of tensor, pipeline and expert parallelism."""

    tp: int = 1
    pp: int = 1
    ep: int = 1

    @property
    def stage_gpus(self) -> int:
        """GPUs that hold the same layers."""
        return max(self.tp, self.ep)

    @property
    def replicas(self) -> int:
        """Copies of the attention, each with its own sequences."""
        return self.stage_gpus // self.tp

    @property
    def num_gpus(self) -> int:
        """Number of GPUs of all stages together."""
        return self.stage_gpus * self.pp

    def __str__(self) -> str:
        return f"TP{self.tp} PP{self.pp} EP{self.ep}"

    @property
    def short(self) -> str:
        """The degrees above 1; empty for one GPU."""
        return " ".join(
            name for name, degree in zip(str(self).split(), (self.tp, self.pp, self.ep), strict=True) if degree > 1
        )


@dataclass(frozen=True, slots=True)
class ShardSlice:
    """Index ranges [start, stop) of dimension `dim`, joined in their order.

    Of a linear weight [outputs, inputs], `dim` 0 are rows and `dim` 1 columns, in every stored format. A fused
    gate_up tensor takes two ranges, one from each half. `experts`: of fused experts [E, ...], only those in this range.
    """

    dim: int
    ranges: tuple[tuple[int, int], ...]
    experts: tuple[int, int] | None = None

    @property
    def size(self) -> int:
        """Number of indices in all ranges together."""
        return sum(stop - start for start, stop in self.ranges)

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        """Raise ValueError if a range does not lie inside a tensor of this shape."""
        if not self.ranges or not 0 <= self.dim < len(shape):
            raise ValueError(f"slice of {name}: dimension {self.dim} of {list(shape)} has no range; name one")
        for dim, (start, stop) in [(self.dim, each) for each in self.ranges] + [(0, self.experts or (0, 1))]:
            if not 0 <= start < stop <= shape[dim]:
                raise ValueError(f"slice of {name}: [{start}, {stop}) is not inside dimension {dim} of {list(shape)}")

    def in_blocks(self, name: str, block: int, size: int) -> ShardSlice:
        """Return the slice in units of `block` indices, for a tensor that holds one element for each block.

        `size` is that of the dimension in single indices. Raises BadCheckpoint for a cut inside a block.
        """
        ranges = []
        for number, (start, stop) in enumerate(self.ranges, 1):
            is_end = stop == size and number == len(self.ranges)
            if start % block or (stop % block and not is_end):
                raise BadCheckpoint(
                    f"tensor {name}: [{start}, {stop}) of dimension {self.dim} cuts a block of {block}; "
                    f"choose a layout that cuts at multiples of {block}"
                )
            ranges.append((start // block, -(-stop // block)))
        return ShardSlice(self.dim, tuple(ranges))


Slices = Mapping[str, ShardSlice]


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of a stage that its rank `place` holds."""

    layout: Layout = Layout()
    place: int = 0

    @property
    def is_whole(self) -> bool:
        """True if the rank holds all of the stage."""
        return self.layout.stage_gpus == 1

    def is_even(self, config: ModelConfig) -> bool:
        """Return whether all ranks have an equally wide part of dense MLPs."""
        parts = [self.middle(config, config.intermediate_size, place) for place in range(self.layout.tp)]
        return len({len(each) for each in parts}) == 1

    def middle(self, config: ModelConfig, size: int, place: int | None = None) -> range:
        """Return the part of a dense MLP's middle that this rank computes, or the one at `place`."""
        return divide(size, self.layout.tp, self.place if place is None else place, _unit(config, size))

    @property
    def is_first(self) -> bool:
        """True for the rank that adds the biases of results that ranks sum up."""
        return self.place == 0

    @property
    def is_first_of_experts(self) -> bool:
        """True for the rank that adds the biases of its experts' results."""
        return self.place % self.ranks_per_expert == 0

    @property
    def ranks_per_expert(self) -> int:
        """Number of ranks that share each expert."""
        return self.layout.stage_gpus // self.layout.ep

    def heads(self, config: ModelConfig, window: int) -> range:
        """Return the rank's query heads in layers with this window."""
        return divide(config.num_heads_with(window), self.layout.tp, self.place)

    def key_heads(self, config: ModelConfig) -> range:
        """Return the rank's key heads; latent attention has one, which every rank holds."""
        if config.latent is not None:
            return range(config.num_kv_heads)
        found = head_range(config.num_kv_heads, self.layout.tp, self.place)
        return range(found.first, found.end)

    def experts(self, experts: Experts) -> range:
        """Return the rank's experts."""
        return divide(experts.num_experts, self.layout.ep, self.place // self.ranks_per_expert)

    def vocabulary(self, config: ModelConfig, place: int | None = None) -> range:
        """Return the rows of embedding and head that this rank holds, or the one at `place`. The last has fewest."""
        rows = -(-config.vocab_size // self.layout.tp)
        first = rows * (self.place if place is None else place)
        return range(min(first, config.vocab_size), min(first + rows, config.vocab_size))

    def vocabulary_widths(self, config: ModelConfig) -> list[int]:
        """Return the number of rows of the vocabulary that each rank holds."""
        return [len(self.vocabulary(config, place)) for place in range(self.layout.tp)]

    def local(self, config: ModelConfig) -> ModelConfig:
        """Return what the rank's building blocks see: the model with this rank's heads only."""
        if self.is_whole:
            return config
        return replace(
            config,
            num_heads=len(self.heads(config, 0)),
            local_num_heads=config.local_num_heads // self.layout.tp,
            num_kv_heads=len(self.key_heads(config)),
        )

    def slices(self, config: ModelConfig) -> Slices:
        """Return the rank's part of each tensor that ranks divide, by the name that it has in a plain checkpoint."""
        return {} if self.is_whole else _slices(config, self)

    def missing(self, config: ModelConfig) -> frozenset[str]:
        """Return the names of stored tensors that the rank holds nothing of: other ranks' experts."""
        if config.experts is None or config.experts.is_fused or self.layout.ep == 1:
            return frozenset()
        held = self.experts(config.experts)
        numbers = ((name, _EXPERT.search(name)) for name in model_tensors(config))
        return frozenset(stored_name(name, config) for name, found in numbers if found and int(found[1]) not in held)


WHOLE = Shard()


def divide(size: int, parts: int, place: int, unit: int = 1) -> range:
    """Return the part at `place` of `size` indices that are cut at multiples of `unit`, as evenly as these allow."""
    num_units = -(-size // unit)
    first, end = (min(size, unit * (num_units * each // parts)) for each in (place, place + 1))
    return range(first, end)


def layout_problem(config: ModelConfig, layout: Layout) -> str:
    """Return why a layout is impossible, naming the option; empty if it is possible."""
    tp, pp, ep = layout.tp, layout.pp, layout.ep
    for num_heads in (config.num_heads, config.local_num_heads):
        if num_heads % tp:
            return f"--tp: {tp} does not divide {num_heads} heads"
    if config.num_kv_heads % tp and tp % config.num_kv_heads:
        return f"--tp: {tp} and {config.num_kv_heads} key heads do not divide each other"
    if pp > config.num_layers:
        return f"--pp: {pp} stages for {config.num_layers} layers"
    if ep > 1 and config.experts is None:
        return f"--ep: {config.architecture} has no experts"
    if config.experts and config.experts.num_experts % ep:
        return f"--ep: {ep} does not divide {config.experts.num_experts} experts"
    if max(tp, ep) % min(tp, ep):
        return f"--ep: {ep} and --tp {tp} do not divide each other"
    return ""


def check_cuts(config: ModelConfig, layout: Layout) -> None:
    """Raise BadPlan if ranks would cut a packed matrix inside a block, or if one would hold nothing of a matrix."""
    shard, tp, experts = Shard(layout), layout.tp, config.experts
    sizes = [("intermediate_size", config.intermediate_size, tp)]
    if experts is not None:
        sizes = sizes if any(not layer.has_experts for layer in config.layers) else []
        sizes += [("expert's size", experts.size, shard.ranks_per_expert), ("shared expert", experts.shared_size, tp)]
    for name, size, parts in sizes:
        unit = _unit(config, size)
        if size and -(-size // unit) < parts:
            raise BadPlan(f"--tp: {parts} ranks cannot share {name} {size}, which is cut at multiples of {unit}")
    if min(shard.vocabulary_widths(config)) == 0:
        raise BadPlan(f"--tp: {tp} ranks are too many for a vocabulary of {config.vocab_size}")
    how = config.quantization
    if how is None or how.is_expanded:
        return
    stored, shapes = expected_tensors(config), expected_tensors(replace(config, quantization=None))
    for name, part in shard.slices(config).items():
        shape = shapes[name]
        if not is_packed(name.removesuffix(".weight"), stored, how):
            continue
        block = _blocks(how, (shape[0], shape[1]))[part.dim]
        try:
            part.in_blocks(name, block, shape[part.dim])
        except BadCheckpoint as error:
            raise BadPlan(f"--tp: {layout.tp} ranks: {error}") from None


def _blocks(how: Quantization, shape: tuple[int, int]) -> tuple[int, int]:
    """Return the units of rows and columns in which a packed matrix can be cut; a whole dimension counts as 1."""
    rows, columns = (each if each < size else 1 for each, size in zip(full_block(how, shape), shape, strict=True))
    return rows, lcm(columns, INT4_WORD) if how.packing in INT4_KERNELS else columns


def _unit(config: ModelConfig, size: int) -> int:
    """Return at which multiples the middle of an MLP of this size is cut: rows of one matrix, columns of the next."""
    how = config.quantization
    if how is None or how.is_expanded:
        return 1
    rows, columns = _blocks(how, (size, config.hidden_size))[0], _blocks(how, (config.hidden_size, size))[1]
    return lcm(rows, columns)


@lru_cache(maxsize=64)
def _slices(config: ModelConfig, shard: Shard) -> Slices:
    found = dict(_all_slices(config, shard))
    shapes = model_tensors(replace(config, quantization=None))
    return {stored_name(name, config): part for name, part in found.items() if name in shapes}


def _all_slices(config: ModelConfig, shard: Shard) -> Iterator[tuple[str, ShardSlice]]:
    """Yield names, by the building blocks, and parts; also of tensors that this model may lack, such as biases."""
    rows = _rows(shard.vocabulary(config))
    yield f"{config.prefix}model.embed_tokens.weight", rows
    yield f"{config.prefix}lm_head.weight", rows
    for index, layer in enumerate(config.layers):
        root = f"{config.prefix}model.layers.{index}."
        attention = _latent_slices if config.latent else _attention_slices
        yield from attention(config, shard, root + "self_attn.", layer)
        mlp, size = f"{root}{config.mlp_name}.", config.intermediate_size
        if layer.has_experts and config.experts:
            yield from _expert_slices(config, shard, mlp, config.experts)
        else:
            yield from _mlp_slices(mlp, shard.middle(config, size), size)


def _attention_slices(
    config: ModelConfig, shard: Shard, root: str, layer: LayerSpec
) -> Iterator[tuple[str, ShardSlice]]:
    dim, heads = config.head_dim, shard.heads(config, layer.window)
    queries, keys = _scaled(heads, dim), _scaled(shard.key_heads(config), dim)
    first_key = config.num_heads_with(layer.window) * dim
    first_value = first_key + config.num_kv_heads * dim
    fused = _rows(queries, _shifted(keys, first_key), _shifted(keys, first_value))
    parts = {"qkv_proj": fused, "q_proj": _rows(queries), "k_proj": _rows(keys), "v_proj": _rows(keys)}
    for name, part in parts.items():
        yield f"{root}{name}.weight", part
        yield f"{root}{name}.bias", part
    if config.head_norm is HeadNorm.WIDE:
        yield root + "q_norm.weight", _rows(queries)
        yield root + "k_norm.weight", _rows(keys)
    if (gate := config.attention_gate) is not None:
        yield f"{root}{gate.name}.weight", _rows(heads if gate.is_per_head else queries)
    yield root + "sinks", _rows(heads)
    yield root + "o_proj.weight", _columns(queries)


def _latent_slices(config: ModelConfig, shard: Shard, root: str, layer: LayerSpec) -> Iterator[tuple[str, ShardSlice]]:
    """The projections down to the latents are whole on every rank, as is the cache."""
    latent, heads = config.latent, shard.heads(config, layer.window)
    assert latent is not None
    q_name = "q_b_proj" if latent.q_rank else "q_proj"
    yield f"{root}{q_name}.weight", _rows(_scaled(heads, latent.nope_dim + latent.rope_dim))
    yield root + "kv_b_proj.weight", _rows(_scaled(heads, latent.nope_dim + latent.value_dim))
    yield root + "o_proj.weight", _columns(_scaled(heads, latent.value_dim))


def _mlp_slices(root: str, middle: range, size: int) -> Iterator[tuple[str, ShardSlice]]:
    into = {"gate_proj": _rows(middle), "up_proj": _rows(middle), "gate_up_proj": _rows(middle, _shifted(middle, size))}
    for name, part in into.items():
        yield f"{root}{name}.weight", part
        yield f"{root}{name}.bias", part
    yield root + "down_proj.weight", _columns(middle)


def _expert_slices(config: ModelConfig, shard: Shard, root: str, experts: Experts) -> Iterator[tuple[str, ShardSlice]]:
    held, size = shard.experts(experts), experts.size
    middle = divide(size, shard.ranks_per_expert, shard.place % shard.ranks_per_expert, _unit(config, size))
    if experts.is_fused:
        yield from _fused_slices(root + "experts.", held, middle, experts)
    else:
        gate, up, down = experts.projections
        for index in held:
            yield f"{root}experts.{index}.{gate}.weight", _rows(middle)
            yield f"{root}experts.{index}.{up}.weight", _rows(middle)
            yield f"{root}experts.{index}.{down}.weight", _columns(middle)
    if size := experts.shared_size:
        yield from _mlp_slices(f"{root}{experts.shared}.", shard.middle(config, size), size)


def _fused_slices(root: str, held: range, middle: range, experts: Experts) -> Iterator[tuple[str, ShardSlice]]:
    both, of = [middle, _shifted(middle, experts.size)], (held.start, held.stop)
    if experts.is_interleaved:
        both = [_scaled(middle, 2)]
    outputs, inputs = (1, 2) if experts.is_output_first else (2, 1)
    yield root + "gate_up_proj", ShardSlice(outputs, _ranges(*both), of)
    yield root + "down_proj", ShardSlice(inputs, _ranges(middle), of)
    yield root + "gate_up_proj_bias", ShardSlice(1, _ranges(*both), of)
    yield root + "down_proj_bias", _rows(held)


def _rows(*ranges: range) -> ShardSlice:
    return ShardSlice(0, _ranges(*ranges))


def _columns(*ranges: range) -> ShardSlice:
    return ShardSlice(1, _ranges(*ranges))


def _ranges(*ranges: range) -> tuple[tuple[int, int], ...]:
    return tuple((each.start, each.stop) for each in ranges)


def _scaled(indices: range, factor: int) -> range:
    return range(indices.start * factor, indices.stop * factor)


def _shifted(indices: range, by: int) -> range:
    return range(indices.start + by, indices.stop + by)
