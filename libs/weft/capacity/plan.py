"""Plans a deployment from a config: does the model fit, with how much context, and how fast at best. No torch.

The bounds count memory bandwidth and arithmetic, but no communication, kernel launches or waiting.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

from weft.capacity.footprint import ITEM_BYTES, Footprint, footprint
from weft.capacity.layout import GIB, Demand, Layout, PipelineStage, on_stage, share
from weft.capacity.roofline import Roofline
from weft.kv.layer_groups import PagingPolicy
from weft.model.kv_layout import kv_groups
from weft.model.spec import WORKSPACE_BYTES, ModelConfig

# CUDA context, libraries' workspaces, captured graphs; and buffers of NCCL where there are several GPUs.
RUNTIME_BYTES = int(1.0 * GIB)
COMMUNICATION_BYTES = int(0.5 * GIB)
# of a step, that a GPU multiplies with packed words (`weft_kernels.packed.linear`)
FUSED_ROWS = 128


@dataclass(frozen=True, slots=True)
class CapacityPlan:
    """One layout. `decode` is (sequences, tokens a second in all) at the demand's context, for some batch sizes."""

    layout: Layout
    stages: tuple[PipelineStage, ...]
    roofline: Roofline
    kv_gib: float
    max_context: int
    sequences: int
    decode: tuple[tuple[int, float], ...]
    prefill: float

    @property
    def tightest(self) -> PipelineStage:
        """The stage with the least memory left for KV."""
        return min(self.stages, key=lambda stage: stage.kv)

    @property
    def fits(self) -> bool:
        """Every stage has room for its weights and at least one token."""
        return self.max_context > 0


def make_plan(config: ModelConfig, layout: Layout, demand: Demand) -> CapacityPlan:
    """Return the plan of one layout."""
    weights = footprint(config, demand.dtype, demand.is_resident)
    bounds = [config.num_layers * index // layout.pp for index in range(layout.pp + 1)]
    stages = tuple(_stage(config, layout, demand, weights, range(*pair)) for pair in pairwise(bounds))
    room = min(stage.kv for stage in stages)
    sequences = 0
    if room > 0:
        sequences = layout.replicas * min(
            stage.kv // max(1, stage.kv_bytes_per_sequence(demand.context)) for stage in stages
        )
    limits = Roofline(config, layout, demand, weights, stages)
    batches = sorted({size for size in (1, demand.batch, sequences) if 0 < size <= sequences})
    return CapacityPlan(
        layout=layout,
        stages=stages,
        roofline=limits,
        kv_gib=sum(max(0, stage.kv) for stage in stages) * layout.stage_gpus / GIB,
        max_context=min(stage.max_context() for stage in stages) if room > 0 else 0,
        sequences=sequences,
        decode=tuple((size, limits.decode(size)) for size in batches),
        prefill=limits.prefill(),
    )


def _stage(config: ModelConfig, layout: Layout, demand: Demand, weights: Footprint, layers: range) -> PipelineStage:
    item = ITEM_BYTES[demand.dtype]
    token = -(-config.num_kv_heads // layout.tp) * config.kv_parts * config.head_dim * item
    spans = [config.layers[index].window or config.layers[index].chunk for index in layers]
    windows = sorted({span for span in spans if span})
    groups = kv_groups(replace(config, layers=config.layers[layers.start : layers.stop]))
    reserve = RUNTIME_BYTES + (COMMUNICATION_BYTES if layout.num_gpus > 1 else 0)
    return PipelineStage(
        layers=layers,
        weights=sum(share(config, layout, kind, each.size_bytes) for kind, each in on_stage(config, weights, layers)),
        activations=_activations(config, layout, demand),
        reserve=reserve,
        memory=int(demand.gpu.memory_gib * GIB),
        growing=token * spans.count(0),
        bounded=tuple((token * spans.count(window), window) for window in windows),
        page=token * groups.size * demand.block_tokens,
        # On a GPU the next step is scheduled while one is in flight.
        paging=PagingPolicy(groups.spans, demand.block_tokens, 2 * demand.chunk_tokens),
    )


def _activations(config: ModelConfig, layout: Layout, demand: Demand) -> int:
    """Return the peak of a prefill step plus the logits of a decode step; both stay allocated."""
    tokens, hidden, item = demand.chunk_tokens, config.hidden_size, ITEM_BYTES[demand.dtype]
    heads = config.num_heads * config.head_dim // layout.tp
    width = 3 * config.intermediate_size // layout.tp
    if config.experts:
        # each token once for every expert it goes to: input, two projections, product, output
        each = 2 * hidden + 3 * config.experts.size * layout.ep // layout.stage_gpus
        width = max(width, config.experts.top_k * each // layout.ep * layout.replicas)
    logits = 2 * 4 * demand.batch * config.vocab_size // layout.tp
    beside = _scratch(config, layout, demand) + _made_keys(config, layout, demand)
    return tokens * item * (4 * hidden + max(3 * heads, width)) + logits + beside


def _scratch(config: ModelConfig, layout: Layout, demand: Demand) -> int:
    """Packed matrices may be unpacked, one at a time, for more rows than FUSED_ROWS. Experts are not."""
    if not demand.is_resident:
        return 0
    widest = max(2 * config.intermediate_size, (config.num_heads + 2 * config.num_kv_heads) * config.head_dim)
    if demand.batch > FUSED_ROWS:  # the head too
        widest = max(widest, config.vocab_size)
    return ITEM_BYTES[demand.dtype] * config.hidden_size * widest // layout.tp


def _made_keys(config: ModelConfig, layout: Layout, demand: Demand) -> int:
    """Latent attention of a long prompt, at its longest: the vectors of its context, and keys and values of some heads,
    first by head and then by block; one prompt at a time. See `weft.model.latent_plan`."""
    latent = config.latent
    if latent is None or demand.chunk_tokens < latent.min_expanded_rows:
        return 0
    item, tokens = ITEM_BYTES[demand.dtype], -(-config.max_positions // demand.block_tokens) * demand.block_tokens
    head = 2 * tokens * latent.expanded_dim * item
    workspace = min(config.num_heads // layout.tp * head, max(WORKSPACE_BYTES, head))
    products = workspace * (latent.nope_dim + latent.value_dim) // (2 * latent.expanded_dim)
    return workspace + products + tokens * (latent.kv_rank + latent.rope_dim) * item
