"""A worker's sizes and memory budget: what its settings leave open, chosen by the machine. No torch.

The worker, `weft up` and `weft doctor` use the same figures. Before loading, the budget uses the estimates of
`weft plan`; afterwards the measured peak of the largest step.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from weft.capacity.draft import DraftSize, feature_rows, step_rows
from weft.capacity.footprint import cpu_bytes, footprint
from weft.capacity.layout import GIB, Demand, Gpu
from weft.capacity.plan import RUNTIME_BYTES, make_plan
from weft.errors import BadCheckpoint
from weft.kv.layer_groups import PagingPolicy
from weft.model.kv_layout import block_bytes, draft_group, kv_groups
from weft.model.sharding import Layout
from weft.model.spec import ModelConfig

# Workers share a machine's memory with one another and with other processes.
CPU_POOL_SHARE = 0.25
# of a GPU: what libraries and captured graphs take beside torch's own memory, which is what is measured
SLACK_BYTES = GIB // 2


@dataclass(frozen=True, slots=True)
class Machine:
    """What the engine runs on and in. `is_resident`: matrices stay packed, on a GPU see `weft_kernels.packed`, on a CPU
    `weft_kernels.linear.packed12`."""

    device: str
    dtype: str
    block_tokens: int
    is_resident: bool = False


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """Bytes. `left` for KV of what is `free` before anything is loaded; negative: not even the model fits."""

    free: int
    weights: int
    activations: int
    available_for_kv: int

    def with_draft(self, weights: int, features: int) -> MemoryBudget:
        """Return the budget that is left beside a draft model with these bytes."""
        left = self.available_for_kv - weights - features
        return MemoryBudget(self.free, self.weights + weights, self.activations + features, left)

    def check(self, pool_bytes: int, what: str) -> None:
        """Raise BadCheckpoint if KV of `pool_bytes`, for `what`, does not fit."""
        if pool_bytes > self.available_for_kv:
            weights, activations, pool, free = (
                f"{size / GIB:.2f} GiB" for size in (self.weights, self.activations, pool_bytes, self.free)
            )
            raise BadCheckpoint(
                f"the model does not fit: it takes {weights} for weights, {activations} for activations and "
                f"{pool} for {what}, and {free} are free"
            )


def estimate_budget(model: ModelConfig, machine: Machine, chunk_tokens: int, max_seqs: int, free: int) -> MemoryBudget:
    """FP8 and INT4 are unpacked on a CPU and stay packed on a GPU, where libraries take their part too. That a CPU
    keeps bfloat16 in less is not counted on: not all matrices may suit it, and each is in both forms for a moment."""
    is_cpu = machine.device == "cpu"
    if is_cpu:
        weights = cpu_bytes(model, machine.dtype)
    else:
        weights = sum(each.size_bytes for each in footprint(model, machine.dtype, machine.is_resident).values())
    gpu = Gpu("this machine", free / GIB, 1, 1, 1)
    demand = Demand(gpu, 1, chunk_tokens, machine.dtype, chunk_tokens, max_seqs, machine.block_tokens)
    demand = replace(demand, is_resident=machine.is_resident and not is_cpu and machine.dtype == "bfloat16")
    activations = make_plan(model, Layout(), demand).stages[0].activations
    return MemoryBudget(free, weights, activations, free - weights - activations - (0 if is_cpu else RUNTIME_BYTES))


def measured_budget(room: MemoryBudget, free: int, activations: int) -> MemoryBudget:
    """The same with the model loaded, `free` bytes left, and a largest step that took so many `activations`."""
    return MemoryBudget(room.free, room.free - free, activations, free - activations - SLACK_BYTES)


def default_num_blocks(room: MemoryBudget, is_cpu: bool, block_bytes: int, least: int, most: int) -> int:
    """Return as many blocks as fit, between `least` and `most`. On a CPU at most CPU_POOL_SHARE of the memory."""
    pool = min(room.available_for_kv, int(room.free * CPU_POOL_SHARE)) if is_cpu else room.available_for_kv
    return max(least, min(most, pool // block_bytes))


BLOCK_TOKENS = {"cpu": 16, "cuda": 64}
# Default prompt tokens of a step: enough that arithmetic and not reading weights limits the matrix products.
CHUNK_TOKENS = {"cpu": 512, "cuda": 2048}
# Prompt tokens beside generating sequences. With 32 clients on two cores and a 182M model, 256 instead of 128 tokens:
# median gap between tokens 187 -> 73 ms, slowest first token 11.0 -> 10.0 s, median first token 1.5 -> 1.7 to 2.1 s
# (docs/results/servers.md).
MIXED_TOKENS = {"cpu": 256, "cuda": 512}
# Prompt tokens of several prompts in one step where no sequence generates: each waits for all of them. Longer steps are
# no cheaper per token on a CPU.
SHARED_TOKENS = {"cpu": 128, "cuda": 512}
# Prompts of requests that arrive together. Four of 270 tokens fit: with fewer, 8 requests start in more groups; with
# more, most of them get their first token with the last group.
BURST_TOKENS = 1088
MAX_SEQS = {"cpu": 64, "cuda": 256}
# A worker that cannot hold this many tokens of one sequence refuses to start.
LEAST_CONTEXT_TOKENS = 1024


@dataclass(frozen=True, slots=True)
class RequestedSizes:
    """The settings of a worker that decide what it takes, called as its WEFT_* variables; 0 and auto: it chooses."""

    dtype: str = "auto"
    weight_format: str = "auto"
    num_blocks: int = 0
    chunk_tokens: int = 0
    max_seqs: int = 0


@dataclass(frozen=True, slots=True)
class Sizes:
    """Chosen. `num_blocks` 0: as many as there is room for."""

    machine: Machine
    chunk_tokens: int
    mixed_tokens: int
    shared_tokens: int
    max_seqs: int
    num_blocks: int

    @property
    def burst_tokens(self) -> int:
        """Maximum prompt tokens of any step: up to three chunks where these are small."""
        return max(self.chunk_tokens, min(3 * self.chunk_tokens, BURST_TOKENS))

    def paging(self, model: ModelConfig) -> PagingPolicy:
        """How the model's sequences lie in the pool. On a GPU a step is planned beside the one under way."""
        steps = 1 if self.machine.device == "cpu" else 2
        return PagingPolicy(
            kv_groups(model).spans, self.machine.block_tokens, self.chunk_tokens * steps, draft_group(model)
        )

    def min_pool(self, model: ModelConfig) -> tuple[int, str]:
        """Return the bytes of the smallest useful pool, and what it holds, as text."""
        num_blocks, what = self.num_blocks, f"{self.num_blocks} blocks of KV (WEFT_NUM_BLOCKS)"
        if not num_blocks:
            num_tokens = min(model.max_positions, LEAST_CONTEXT_TOKENS)
            num_blocks, what = self.paging(model).max_pages(num_tokens), f"KV of {num_tokens} tokens"
        return num_blocks * block_bytes(model, self.machine.dtype, self.machine.block_tokens), what

    def memory_budget(self, model: ModelConfig, free: int, draft: DraftSize | None = None) -> MemoryBudget:
        """Return the budget for this model with `free` bytes before loading. Does not check that it fits."""
        room = estimate_budget(model, self.machine, self.burst_tokens, self.max_seqs, free)
        return room.with_draft(draft.weight_bytes, self.feature_bytes(model, draft)) if draft else room

    def feature_bytes(self, model: ModelConfig, draft: DraftSize) -> int:
        """Return the bytes of the target's states that a draft model reads."""
        kept = feature_rows(self.machine.block_tokens) * self.max_seqs
        return draft.feature_bytes(model, kept + step_rows(self.burst_tokens, self.max_seqs))


def choose_sizes(wanted: RequestedSizes, has_cuda: bool) -> Sizes:
    """Return the settings, with defaults of the device for what they leave open."""
    device = "cuda" if has_cuda else "cpu"
    dtype = {"cpu": "float32", "cuda": "bfloat16"}[device] if wanted.dtype == "auto" else wanted.dtype
    # On a GPU packed weights need an explicit setting, because their kernels may never have run on that GPU.
    is_resident = device == "cpu" if wanted.weight_format == "auto" else wanted.weight_format == "packed12"
    return Sizes(
        machine=Machine(device, dtype, BLOCK_TOKENS[device], is_resident),
        chunk_tokens=wanted.chunk_tokens or CHUNK_TOKENS[device],
        mixed_tokens=MIXED_TOKENS[device],
        shared_tokens=SHARED_TOKENS[device],
        max_seqs=wanted.max_seqs or MAX_SEQS[device],
        num_blocks=wanted.num_blocks,
    )
