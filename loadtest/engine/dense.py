"""Decode step of every dense family beside that of a Llama with equal bytes, on a CPU.

    GOMP_SPINCOUNT=5000 python -m loadtest.engine.dense --threads 2 --only gemma3,glm4

All models have the sizes of the 213M shape. All engines of a run take turns, a Llama first and
last among them.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from loadtest.engine.drive import Bench, Settings
from loadtest.engine.shapes import SMALL, Shape, weight_bytes
from weft.worker.os_tuning import disable_malloc_trim

NUM_LAYERS = 16
WINDOW = {"sliding_window": 512}
GEMMA3 = {**WINDOW, "query_pre_attn_scalar": 64, "rope_local_base_freq": 10_000.0}
GRANITE = {
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.015625,
    "logits_scaling": 8.0,
}
YARN = {"rope_type": "yarn", "rope_theta": 500_000.0, "factor": 8.0, "original_max_position_embeddings": 8192}
OLMO3_ROPES = {
    "full_attention": YARN,
    "sliding_attention": {"rope_type": "default", "rope_theta": 500_000.0},
}
GROWING = {**YARN, "llama_4_scaling_beta": 0.1}
# name: architecture, fields that a Llama lacks
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {}),
    "qwen2": ("Qwen2ForCausalLM", {}),
    "qwen3": ("Qwen3ForCausalLM", {}),
    "mistral": ("MistralForCausalLM", WINDOW),
    "ministral3": ("Ministral3ForCausalLM", {"rope_parameters": GROWING}),
    "smollm3": ("SmolLM3ForCausalLM", {}),
    "phi3": ("Phi3ForCausalLM", {}),
    "seed-oss": ("SeedOssForCausalLM", {}),
    "ernie": ("Ernie4_5ForCausalLM", {}),
    "granite": ("GraniteForCausalLM", GRANITE),
    "gemma3": ("Gemma3ForCausalLM", GEMMA3),
    "glm4": ("Glm4ForCausalLM", {}),
    "olmo2": ("Olmo2ForCausalLM", {}),
    "olmo3": ("Olmo3ForCausalLM", {**WINDOW, "rope_parameters": OLMO3_ROPES}),
    "exaone4": ("Exaone4ForCausalLM", WINDOW),
}


@dataclass(frozen=True)
class Task:
    """Steps of `batch` sequences from `context` tokens on: `rounds` of `steps` for each engine."""

    batch: int
    context: int
    steps: int
    rounds: int
    clock: Callable[[], float]


def shape_of(family: str) -> Shape:
    """Return the family's model with the sizes of the 213M shape."""
    architecture, fields = FAMILIES[family]
    return Shape(family, {**SMALL, **fields, "architectures": [architecture]}, NUM_LAYERS, NUM_LAYERS)


def measure(names: list[str], settings: Settings, task: Task) -> dict[str, float]:
    """Return the step of each family in seconds, of models made in this order and once more in reverse.

    The first engine is left out: a model that was made later ran up to 14% faster, whatever its family.
    """
    found: dict[str, list[float]] = {name: [] for name in names}
    for ordered in (names, names[::-1]):
        benches = [Bench(shape_of(name), settings, task.clock) for name in ("llama", *ordered)]
        for name, step in list(zip(("", *ordered), in_turns(benches, task), strict=True))[1:]:
            found[name].append(step)
        for bench in benches:
            bench.close()
    return {name: statistics.geometric_mean(steps) for name, steps in found.items()}


def in_turns(benches: list[Bench], task: Task) -> list[float]:
    """Return the median over rounds of each engine's median step, in seconds."""
    times: list[list[float]] = [[] for _ in benches]
    for index in range(task.rounds + 1):
        for bench, seconds in zip(benches, times, strict=True):
            step = statistics.median(bench.decode(task.batch, task.context, task.steps))
            seconds += [step] if index else []  # the first round warms up
    return [statistics.median(seconds) for seconds in times]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall", help="cpu: one thread on a busy machine")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--only", default=",".join(list(FAMILIES)[1:]), help="names of families, separated by commas")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=4)
    options = parser.parse_args()
    disable_malloc_trim()  # as a worker does
    torch.set_num_threads(options.threads)
    settings = Settings("cpu", options.dtype, 16, 512, options.batch, kv_gib=0.25, is_resident=True)
    clock = time.thread_time if options.clock == "cpu" else time.perf_counter
    task = Task(options.batch, options.context, options.steps, options.rounds, clock)
    steps = measure(["llama", *options.only.split(","), "llama"], settings, task)
    print("| family | step | of Llama's | bytes of weights, of Llama's |\n|---|---|---|---|")
    for name, step in steps.items():
        share = weight_bytes(shape_of(name).config()) / weight_bytes(shape_of("llama").config())
        print(f"| {name} | {step * 1e3:.2f} ms | {step / steps['llama']:.3f} | {share:.4f} |")


if __name__ == "__main__":
    main()
