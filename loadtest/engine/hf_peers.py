"""transformers beside the engine, where it is installed: `generate` with its own cache, and its continuous batching.

The same shape with random weights, the same batch and context. The time of a step is that of a longer run less that of
a shorter one, over the tokens between them.
"""

from __future__ import annotations

import inspect
import random
import time
from collections.abc import Callable
from typing import Any

import torch

from loadtest.engine.drive import Settings
from loadtest.engine.limits import synchronize
from loadtest.engine.results import Point, Results
from loadtest.engine.shapes import Shape
from loadtest.engine.sweep import Grid

CONTEXT = 1024
BATCHES = (1, 32)
FEW, PAGE_TOKENS = 4, 256
Run = Callable[[list[list[int]], int], None]


def run_peers(shape: Shape, settings: Settings, grid: Grid, results: Results) -> None:
    """Measure both ways, at batch 1 and 32 or those of the grid."""
    context = CONTEXT if CONTEXT in grid.contexts else max(grid.contexts)
    batches = [each for each in BATCHES if each in grid.batches] or list(grid.batches)
    points = [
        Point(shape.name, "decode", batch, context, engine=f"transformers {way}")
        for way in ("generate", "continuous batching")
        for batch in batches
    ]
    points = [point for point in points if not results.has(point)]
    try:
        model = make_model(shape, settings) if points else None
    except ImportError as error:
        for point in points:
            results.skip(point, f"not installed: {error}")
        return
    for point in points:
        if results.seconds_left < 40:
            results.skip(point, "no time left", is_late=True)
            continue
        run = _generate(model) if point.engine.endswith("generate") else _continuous(model)
        measure_peer(point, run, grid.steps, settings, results)


def make_model(shape: Shape, settings: Settings) -> Any:
    """Return a model of transformers, created on the device. Raises ImportError without transformers."""
    import transformers

    build: Callable[..., Any] = transformers.AutoModelForCausalLM.from_config
    fields = {name: value for name, value in shape.all_fields.items() if name not in ("architectures", "dtype")}
    config = transformers.LlamaConfig(**fields)
    with torch.device(settings.device):
        model = build(config, dtype=getattr(torch, settings.dtype))
    return model.eval()


def measure_peer(point: Point, run: Run, steps: int, settings: Settings, results: Results) -> None:
    """Measure one point; an error becomes its note."""
    source = random.Random(1)
    prompts = [[source.randrange(3, 300) for _ in range(point.tokens)] for _ in range(point.batch)]

    def seconds(new_tokens: int) -> float:
        start = time.perf_counter()
        run(prompts, new_tokens)
        synchronize(settings.device)
        return time.perf_counter() - start

    try:
        seconds(FEW)
        step = (seconds(FEW + steps) - seconds(FEW)) / steps
    except Exception as error:
        results.skip(point, f"failed: {type(error).__name__}: {str(error)[:160]}")
        return
    if step <= 0:
        results.skip(point, "failed: a longer run took no longer than a shorter one")
        return
    results.add(point, ms=step * 1e3, tok_s=point.batch / step)


def _generate(model: Any) -> Run:
    @torch.inference_mode()
    def run(prompts: list[list[int]], new_tokens: int) -> None:
        tokens = torch.tensor(prompts, device=model.device)
        lengths = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens}
        model.generate(tokens, attention_mask=torch.ones_like(tokens), do_sample=False, pad_token_id=0, **lengths)

    return run


def _continuous(model: Any) -> Run:
    from transformers import ContinuousBatchingConfig, GenerationConfig

    make_config: Callable[..., Any] = GenerationConfig

    @torch.no_grad()
    def run(prompts: list[list[int]], new_tokens: int) -> None:
        # -1: no token ends a text
        config = make_config(max_new_tokens=new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
        pages = sum((len(prompt) + new_tokens) // PAGE_TOKENS + 2 for prompt in prompts)
        # as older versions of transformers call it
        name = "page_size" if "page_size" in inspect.signature(ContinuousBatchingConfig).parameters else "block_size"
        fields: dict[str, Any] = {name: PAGE_TOKENS, "num_blocks": pages}
        batching = ContinuousBatchingConfig(**fields)
        found = model.generate_batch(inputs=prompts, generation_config=config, continuous_batching_config=batching)
        lengths = {len(each.generated_tokens) for each in found.values()}
        if len(found) != len(prompts) or lengths != {new_tokens}:
            raise RuntimeError(f"{len(found)} answers of {lengths} tokens to {len(prompts)} prompts")

    return run
