"""Memory budget of a worker: weights, activations, KV. Allocates nothing.

Before loading it uses the estimates of `weft plan`; afterwards the measured peak of the largest step.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from weft.capacity.footprint import cpu_bytes, footprint
from weft.capacity.gpus import Gpu
from weft.capacity.layout import GIB, Demand, Layout
from weft.capacity.plan import RUNTIME_BYTES, make_plan
from weft.errors import BadCheckpoint
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
