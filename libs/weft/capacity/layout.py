"""GPUs, layouts of a model over them, and the bytes that each GPU holds. No torch.

A layout is TP x PP x EP: layers in `pp` stages, each stage on max(tp, ep) GPUs. TP divides heads and matrices; experts
are divided over all GPUs of a stage; with ep > tp the attention stands ep / tp times, each with sequences of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

from weft.capacity.draft import DraftSize
from weft.capacity.footprint import FIRST, LAST, Footprint, TensorKind, Weight
from weft.kv.layer_groups import PagingPolicy
from weft.model.sharding import BadPlan, Layout, layout_problem
from weft.model.spec import ModelConfig


@dataclass(frozen=True, slots=True)
class Gpu:
    """`memory_gib` is what a process sees, below what is on the label; rates are 10^12 bytes and operations a second.

    `tflops` is dense bfloat16 with fp32 sums, `fp32_tflops` without tensor cores.
    """

    name: str
    memory_gib: float
    bandwidth_tb: float
    tflops: float
    fp32_tflops: float


GPUS = {
    "h100": Gpu("H100 80GB SXM", 79.1, 3.35, 989, 67),
    "h200": Gpu("H200 141GB SXM", 139.7, 4.8, 989, 67),
    "a100": Gpu("A100 80GB SXM", 79.1, 2.04, 312, 19.5),
    "l40s": Gpu("L40S 48GB", 44.4, 0.864, 362, 91.6),
    "rtx4090": Gpu("RTX 4090 24GB", 23.5, 1.008, 165, 82.6),
    "b200": Gpu("B200 180GB SXM", 178.3, 8.0, 2250, 75),
}


GIB = 1 << 30
# Longer than anything: all layers see a window alone, and KV stops growing.
UNBOUNDED = 1 << 62


@dataclass(frozen=True, slots=True)
class Demand:
    """What is asked of a deployment. `chunk_tokens`: tokens of one prefill step; `dtype`: of KV and plain weights.

    `block_tokens`: tokens of a page of KV. `is_resident`: matrices stay packed, see `weft_kernels.packed`. `draft`: of
    a draft model, which every GPU of the last stage holds whole.
    """

    gpu: Gpu
    num_gpus: int
    context: int
    dtype: str
    chunk_tokens: int = 2048
    batch: int = 32
    block_tokens: int = 64
    is_resident: bool = False
    draft: DraftSize | None = None


@dataclass(frozen=True, slots=True)
class PipelineStage:
    """Bytes on each GPU of one pipeline stage. KV of a token is `growing` bytes, and `bounded` more within windows.

    `bounded`: (bytes a token, tokens at most) of the layers of each window. `page`: bytes of what the pool hands out.
    `features`: states of the target that a draft model reads.
    """

    layers: range
    weights: int
    activations: int
    reserve: int
    memory: int
    growing: int
    bounded: tuple[tuple[int, int], ...]
    page: int
    paging: PagingPolicy
    features: int = 0

    @property
    def kv(self) -> int:
        """Bytes left for KV; negative if the stage does not fit."""
        return self.memory - self.weights - self.activations - self.features - self.reserve

    def kv_bytes_read(self, context: int) -> int:
        """Return the KV bytes that the last of `context` tokens reads."""
        return self.growing * context + sum(size * min(context, window) for size, window in self.bounded)

    def kv_bytes_per_sequence(self, context: int) -> int:
        """Return the KV bytes of a sequence that generates up to `context` tokens, in whole pages."""
        return self.page * self.paging.num_pages(context)

    def max_context(self) -> int:
        """Return the maximum tokens of one sequence that the KV memory holds, as the engine counts."""
        return self.paging.max_sequence_tokens(max(0, self.kv) // self.page, UNBOUNDED)


def layouts(config: ModelConfig, num_gpus: int) -> list[Layout]:
    """Return all layouts that divide this model evenly over `num_gpus` GPUs."""
    sizes = [size for size in range(1, num_gpus + 1) if num_gpus % size == 0]
    found = []
    for tp in sizes:
        for pp in sizes:
            for ep in sizes:
                layout = Layout(tp, pp, ep)
                if layout.num_gpus == num_gpus and not layout_problem(config, layout):
                    found.append(layout)
    return found


def check_layout(config: ModelConfig, layout: Layout, num_gpus: int) -> None:
    """Raise BadPlan if the layout does not divide the model, or needs another number of GPUs."""
    problem = layout_problem(config, layout)
    if not problem and layout.num_gpus != num_gpus:
        problem = f"--gpus: {layout} takes {layout.num_gpus} GPUs, not {num_gpus}"
    if problem:
        raise BadPlan(problem)


def on_stage(config: ModelConfig, weights: Footprint, layers: range) -> list[tuple[TensorKind, Weight]]:
    """The weights that a stage holds: its layers', the first stage's embedding, the last one's head."""
    has_first, has_last = layers.start == 0, layers.stop == config.num_layers
    found = []
    for (place, kind), weight in weights.items():
        # a tied head is the embedding, and stands on the last stage once more
        is_tied_head = config.is_tied and place == FIRST and has_last
        if place in layers or (place == FIRST and has_first) or (place == LAST and has_last) or is_tied_head:
            found.append((kind, weight))
    return found


def share(config: ModelConfig, layout: Layout, kind: TensorKind, size: int) -> int:
    """Return the part of `size` that one GPU of a stage holds."""
    if kind is TensorKind.WHOLE:
        return size
    if kind is TensorKind.EXPERTS:
        return -(-size // layout.stage_gpus)
    parts = min(layout.tp, config.num_kv_heads) if kind is TensorKind.KEYS_VALUES else layout.tp
    return -(-size // parts)
