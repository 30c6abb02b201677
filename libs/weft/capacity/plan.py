"""Plans a deployment from a config: does the model fit, with how much context, and how fast at best. No torch.

The bounds are a roofline: the slower of memory traffic and arithmetic, without communication, kernel launches or
waiting.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from itertools import pairwise

from weft.capacity.draft import feature_rows, step_rows
from weft.capacity.footprint import ITEM_BYTES, Footprint, TensorKind, Weight, footprint
from weft.capacity.layout import GIB, Demand, PipelineStage, on_stage, share
from weft.kv.layer_groups import PagingPolicy
from weft.model.kv_layout import draft_group, kv_groups, page_numbers, token_numbers
from weft.model.sharding import Layout
from weft.model.spec import WORKSPACE_BYTES, ModelConfig

TERA = 1e12


@dataclass(frozen=True, slots=True)
class StepShape:
    """One step of a stage: `rows` tokens of each attention replica, `total` of all, each seeing `keys` at most."""

    rows: float
    total: float
    keys: float
    kv_bytes: float
    has_head: bool = True


@dataclass(frozen=True, slots=True)
class Roofline:
    """Bounds in tokens per second of all GPUs together."""

    config: ModelConfig
    layout: Layout
    demand: Demand
    weights: Footprint
    stages: tuple[PipelineStage, ...]

    def decode(self, batch: int) -> float:
        """`batch` sequences of the demand's context generate, in as many groups as keep all stages busy."""
        seconds = [self.seconds(stage, self.decode_step(stage, batch)) for stage in self.stages]
        return batch / max(sum(seconds), self._groups(batch) * max(seconds))

    def prefill(self) -> float:
        """Prompts of the demand's context in chunks; a token sees half of it on average."""
        slowest = max(self.seconds(stage, self.prefill_step(stage)) for stage in self.stages)
        return self.demand.chunk_tokens * self.layout.replicas / slowest

    def decode_step(self, stage: PipelineStage, batch: int) -> StepShape:
        """Return the shape of a decode step: one token of each sequence of one group."""
        busy, context = min(batch, self.layout.replicas), self.demand.context
        rows = batch / busy / self._groups(batch)
        return StepShape(rows, rows * busy, context, rows * stage.kv_bytes_read(context))

    def prefill_step(self, stage: PipelineStage) -> StepShape:
        """Return the shape of a step with one prompt chunk."""
        rows, half = self.demand.chunk_tokens, self.demand.context / 2
        return StepShape(rows, rows * self.layout.replicas, half, stage.kv_bytes_read(int(half)), has_head=False)

    def seconds(self, stage: PipelineStage, step: StepShape) -> float:
        """Return the seconds of one step on one GPU of the stage."""
        gpu = self.demand.gpu
        rate = gpu.fp32_tflops if self.demand.dtype == "float32" else gpu.tflops
        return max(self.read_bytes(stage, step) / (gpu.bandwidth_tb * TERA), self.operations(stage, step) / rate / TERA)

    def read_bytes(self, stage: PipelineStage, step: StepShape) -> float:
        """Return the bytes read: each weight that a token needs once, and the keys and values."""
        total = step.kv_bytes
        for kind, weight in self._computed(stage, step):
            part = share(self.config, self.layout, kind, weight.size_bytes)
            total += part * self.touched(step.total) if kind is TensorKind.EXPERTS else part
        return total

    def operations(self, stage: PipelineStage, step: StepShape) -> float:
        """Two for each weight and token, and for each number of each key and value that a head sees."""
        total = 0.0
        for kind, weight in self._computed(stage, step):
            part = share(self.config, self.layout, kind, weight.params)
            total += 2 * part * (step.total * self._chosen if kind is TensorKind.EXPERTS else step.rows)
        layers = [self.config.layers[index] for index in stage.layers]
        spans = [(layer.window or layer.chunk or step.keys, layer.window) for layer in layers]
        seen = sum(min(step.keys, span) * self.config.num_heads_with(window) for span, window in spans)
        return total + 2 * step.rows * seen * self._head_numbers(step) / self.layout.tp

    def touched(self, tokens: float) -> float:
        """Return the expected share of experts that `tokens` tokens reach, if chosen at random."""
        return float(1 - (1 - self._chosen) ** tokens)

    def _groups(self, batch: int) -> int:
        return min(self.layout.pp, -(-batch // min(batch, self.layout.replicas)))

    @property
    def _chosen(self) -> float:
        return self.config.experts.top_k / self.config.experts.num_experts if self.config.experts else 1.0

    def _head_numbers(self, step: StepShape) -> int:
        """Of a key and a value of one head; latent ones are compared as they lie in decode, unfolded in prefill."""
        latent = self.config.latent
        if latent is None:
            return 2 * self.config.head_dim
        if step.has_head:
            return self.config.head_dim + latent.kv_rank
        return latent.nope_dim + latent.rope_dim + latent.value_dim

    def _computed(self, stage: PipelineStage, step: StepShape) -> list[tuple[TensorKind, Weight]]:
        """Embeddings are looked up, unless they are the head too; a prompt needs the head for one row alone."""
        is_last = stage.layers.stop == self.config.num_layers
        head = TensorKind.EMBEDDING if self.config.is_tied else TensorKind.HEAD
        skipped = {TensorKind.EMBEDDING, TensorKind.HEAD} - ({head} if is_last and step.has_head else set())
        return [each for each in on_stage(self.config, self.weights, stage.layers) if each[0] not in skipped]


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
    is_last = layers.stop == config.num_layers
    own = replace(config, layers=config.layers[layers.start : layers.stop], drafts=config.drafts if is_last else ())
    token_bytes: Counter[int] = Counter()
    for layer in own.kv_layers:
        token_bytes[layer.window or layer.chunk] += token_numbers(own, layer, layout.tp) * item
    reserve = RUNTIME_BYTES + (COMMUNICATION_BYTES if layout.num_gpus > 1 else 0)
    draft = demand.draft if is_last else None
    num_rows = feature_rows(demand.block_tokens) * demand.batch + step_rows(demand.chunk_tokens, demand.batch)
    held = sum(share(config, layout, kind, each.size_bytes) for kind, each in on_stage(config, weights, layers))
    return PipelineStage(
        layers=layers,
        weights=held + (draft.weight_bytes if draft else 0),
        activations=_activations(config, layout, demand),
        reserve=reserve,
        memory=int(demand.gpu.memory_gib * GIB),
        growing=token_bytes[0],
        bounded=tuple((token_bytes[window], window) for window in sorted(token_bytes) if window),
        page=page_numbers(own, layout.tp) * demand.block_tokens * item,
        # On a GPU the next step is scheduled while one is in flight.
        paging=PagingPolicy(kv_groups(own).spans, demand.block_tokens, 2 * demand.chunk_tokens, draft_group(own)),
        features=draft.feature_bytes(config, num_rows) if draft else 0,
    )


def _activations(config: ModelConfig, layout: Layout, demand: Demand) -> int:
    """Return the peak of a prefill step plus the logits of a decode step; both stay allocated."""
    tokens, hidden, item = demand.chunk_tokens, config.hidden_size, ITEM_BYTES[demand.dtype]
    heads = max(config.num_heads, config.local_num_heads) * config.head_dim // layout.tp
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
    first by head and then by block; one prompt at a time. See `weft.model.step`."""
    latent = config.latent
    if latent is None or demand.chunk_tokens < latent.min_expanded_rows:
        return 0
    item, tokens = ITEM_BYTES[demand.dtype], -(-config.max_positions // demand.block_tokens) * demand.block_tokens
    head = 2 * tokens * latent.expanded_dim * item
    workspace = min(config.num_heads // layout.tp * head, max(WORKSPACE_BYTES, head))
    products = workspace * (latent.nope_dim + latent.value_dim) // (2 * latent.expanded_dim)
    return workspace + products + tokens * (latent.kv_rank + latent.rope_dim) * item
