"""Upper bound on a layout's speed: the slower of memory traffic and arithmetic. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from weft.capacity.footprint import Footprint, TensorKind, Weight
from weft.capacity.layout import Demand, Layout, PipelineStage, on_stage, share
from weft.model.spec import ModelConfig

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
        spans = [self.config.layers[index].window or self.config.layers[index].chunk for index in stage.layers]
        seen = sum(min(step.keys, span) if span else step.keys for span in spans)
        return total + 2 * step.rows * seen * self._head_numbers(step) * self.config.num_heads / self.layout.tp

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
