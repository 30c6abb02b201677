"""Of what the H200 bars ask for: the time that a step cannot beat, on a GPU by arithmetic, on the host by the clock."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from loadtest.engine.queue_cost import NoModel, config_for, microseconds
from loadtest.engine.queue_cost import Step as Done
from loadtest.engine.shapes import SHAPES
from loadtest.kernels.packed_bounds import COPIED, ISSUED, MULTIPLIED, largest_loop
from weft.capacity.layout import Demand, Gpu, Layout
from weft.capacity.plan import TERA, CapacityPlan, StepShape, make_plan
from weft.engine.config import EngineConfig
from weft.engine.runner import StepInputBuilder
from weft.engine.step_scheduler import ScheduledChunk
from weft_kernels.paged_attention import decode
from weft_kernels.paged_attention.device_batch import AttentionShape

H200 = Gpu("H200 as measured", 139.7, COPIED / TERA, MULTIPLIED / TERA, 67)
SHAPE = SHAPES["8B"]


@dataclass(frozen=True, slots=True)
class Part:
    """Bytes read, operations, and the time that the slower of the two takes."""

    read: float
    operations: float

    @property
    def ms(self) -> float:
        """On an H200."""
        return max(self.read / COPIED, self.operations / MULTIPLIED) * 1e3


def plan_of(context: int) -> CapacityPlan:
    """The 8B on one H200, prompts in one chunk."""
    return make_plan(SHAPE.config(), Layout(), Demand(H200, 1, context, "bfloat16", context))


def parts_of(plan: CapacityPlan, step: StepShape) -> tuple[Part, Part]:
    """Products with weights, and attention: one runs after the other."""
    stage, alone = plan.stages[0], replace(step, keys=0.0, kv_bytes=0.0)
    products = Part(plan.roofline.read_bytes(stage, alone), plan.roofline.operations(stage, alone))
    return products, Part(step.kv_bytes, plan.roofline.operations(stage, step) - products.operations)


@dataclass(frozen=True, slots=True)
class AttentionLoop:
    """The main loop of decode attention as compiled for Hopper, on heads of the 8B."""

    slots: int
    key_bytes: int

    @property
    def issue_share(self) -> float:
        """Of the time in which its keys and values are read, what issuing takes."""
        return self.slots / ISSUED / (self.key_bytes / COPIED)


def attention_loop() -> AttentionLoop:
    """Compiled with the constants of a launch for a batch."""
    config = SHAPE.config()
    pool = torch.empty(1, config.num_kv_heads, 1, 2, 64, config.head_dim, dtype=torch.bfloat16)
    tiles = AttentionShape(1.0).tiles(pool[:, :, 0, 0], pool[:, :, 0, 1], 64)
    warps, group = 4, config.num_heads // config.num_kv_heads
    fixed = {
        "SPLITS": 2,
        "KV_HEADS": config.num_kv_heads,
        "GROUP": group,
        "WINDOW": 0,
        "CHUNK": 0,
        "USES_PDL": False,
        "BLOCK_M": 16,
    }
    constants: dict[str, Any] = {**fixed, **tiles}
    types = dict.fromkeys(("p_q", "p_keys", "p_values"), "*bf16") | dict.fromkeys(("p_parts", "p_logs"), "*fp32")
    types |= dict.fromkeys(("p_starts", "p_contexts", "p_tables"), "*i32") | {"scale": "fp32"}
    names = [param.name for param in decode._decode.params]
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if name not in (*constants, "scale")}
    source = ASTSource(decode._decode, signature, constants, aligned)
    options = {"num_warps": warps, "num_stages": 2}
    cubin: bytes = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["cubin"]
    return AttentionLoop(largest_loop(cubin) * 32 * warps, tiles["BLOCK_N"] * 2 * config.head_dim * 2)


class Packing(NoModel):
    """Brings each step's rows and block tables together, as the runner does before it launches."""

    def __init__(self, config: EngineConfig) -> None:
        self.packer = StepInputBuilder(config.paging)

    def launch(self, works: Items[ScheduledChunk]) -> Done:
        """No device."""
        self.packer.build(works)
        return Done(works)


def host_seconds(batch: int) -> float:
    """What the loop's thread does between two steps, on this machine."""
    config = config_for(batch, 1)
    return microseconds(0, config, Packing(config)) / 1e6


def least_ms(plan: CapacityPlan, batch: int) -> float:
    """Of a step in which everybody generates."""
    return sum(part.ms for part in parts_of(plan, plan.roofline.decode_step(plan.stages[0], batch)))


def peer_seconds(batch: int = 32, steps: int = 20) -> float:
    """A decode step of transformers' `generate` on 32 layers so narrow that next to nothing is multiplied."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=SHAPE.layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        pad_token_id=0,
    )
    model: Any = transformers.LlamaForCausalLM(config)
    model.eval()
    tokens = torch.full((batch, 16), 3)
    fixed: dict[str, Any] = {"do_sample": False, "attention_mask": torch.ones_like(tokens)}

    def seconds(count: int) -> float:
        start = time.perf_counter()
        model.generate(tokens, max_new_tokens=count, min_new_tokens=count, **fixed)
        return time.perf_counter() - start

    seconds(2)
    return statistics.median((seconds(2 + steps) - seconds(2)) / steps for _ in range(3))
