"""The cost of grammar masks for a step of the engine, with weft-nano: `python -m loadtest.engine.masks`.

Every sequence of the batch follows a JSON schema of its own, and then none does, in turns; and one mask alone.
"""

from __future__ import annotations

import argparse
import json
import queue
import statistics
import time
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from loadtest.report import ROOT, machine, table, verdict
from weft.engine.config import EngineConfig
from weft.engine.engine import Engine
from weft.engine.messages import Constraint, SequenceMode, SequenceSpec, StepOutput
from weft.engine.runner import build_engine
from weft.grammar import Grammars, load_grammars
from weft.model.config import read_config
from weft.model.kv_layout import kv_groups
from weft.request import RequestKey, SamplingParams

MODEL = ROOT / "models" / "weft-nano"
PROMPT_TOKENS, TOKENS, BLOCK_TOKENS = 32, 160, 16
DEADLINE_SECONDS = 120.0
# of a step, for one sequence's mask
BAR = 0.05
Outputs = queue.Queue[StepOutput]


def schema(number: int) -> dict[str, Any]:
    """Return the schema of a list that outlasts the run; no two are the same grammar."""
    item = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 12},
            "kind": {"enum": ["river", "mountain", f"place {number}"]},
            "height": {"type": "integer", "minimum": 0, "maximum": 9000},
            "seen": {"type": "boolean"},
        },
        "required": ["name", "kind", "height", "seen"],
        "additionalProperties": False,
    }
    return {"type": "array", "items": item, "minItems": 64}


def constraint(grammars: Grammars, number: int) -> Constraint:
    """Return a constraint at its beginning."""
    return grammars.compile(json.dumps({"grammars": [{"json_schema": schema(number)}]}))


def open_engine(outputs: Outputs, threads: int) -> Engine:
    """Start weft-nano as a CPU worker runs it."""
    torch.set_num_threads(threads)
    config = read_config(MODEL)
    limits = EngineConfig(
        num_blocks=2048,
        block_tokens=BLOCK_TOKENS,
        vocab_size=config.vocab_size,
        max_context_tokens=config.max_positions,
        max_num_seqs=64,
        spans=kv_groups(config).spans,
    )
    weights = load_file(MODEL / "model.safetensors")
    engine = build_engine(config, weights, dtype="float32", device="cpu", engine_config=limits, listener=outputs.put)
    engine.start()
    return engine


def steps(engine: Engine, outputs: Outputs, name: str, constraints: list[Constraint | None]) -> list[float]:
    """Return the seconds of each step in which every sequence had a token."""
    for number, each in enumerate(constraints):
        sampling = SamplingParams(TOKENS, temperature=1.0, seed=number, ignore_eos=each is None)
        prompt = tuple(100 + (number * 31 + place) % 900 for place in range(PROMPT_TOKENS))
        key = RequestKey(f"{name}-{number}")
        engine.submit(SequenceSpec(key, prompt, sampling, SequenceMode.GENERATE, constraint=each))
    heard, left, deadline = [], len(constraints), time.perf_counter() + DEADLINE_SECONDS
    while left and time.perf_counter() < deadline:
        output = outputs.get(timeout=DEADLINE_SECONDS)
        if output.failures:
            raise RuntimeError(f"{name}: {output.failures[0].error}")
        heard += [time.perf_counter()] if len(output.deltas) == len(constraints) else []
        left -= sum(delta.finish_reason is not None for delta in output.deltas)
    return [end - start for start, end in pairwise(heard)]


def follow(one: Constraint, vocab_size: int, tokens: int) -> list[float]:
    """Return the seconds of each mask of an answer and of accepting a token that it allows, until the answer ends."""
    words, seconds = np.zeros(-(-vocab_size // 32), dtype=np.int32), []
    dice = np.random.default_rng(1)
    for _ in range(tokens):
        began = time.perf_counter()
        one.fill(words)
        took = time.perf_counter() - began
        (allowed,) = np.nonzero(np.unpackbits(words.view(np.uint8), bitorder="little")[:vocab_size])
        if one.failure is not None or not len(allowed):
            break
        chosen = int(dice.choice(allowed))
        began = time.perf_counter()
        one.accept([chosen])
        seconds.append(took + time.perf_counter() - began)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m loadtest.engine.masks", description=__doc__)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    outputs: Outputs = queue.Queue()
    config = read_config(MODEL)
    grammars = load_grammars(MODEL, config.vocab_size, config.eos_token_ids)
    engine = open_engine(outputs, options.threads)
    free: list[float] = []
    masked: list[float] = []
    for number in range(options.rounds):
        free += steps(engine, outputs, f"free {number}", [None] * options.batch)
        held: list[Constraint | None] = [constraint(grammars, each) for each in range(options.batch)]
        masked += steps(engine, outputs, f"masked {number}", held)
    engine.stop()
    step, constrained = statistics.median(free) * 1e3, statistics.median(masked) * 1e3
    mask = statistics.median(follow(constraint(grammars, 0), config.vocab_size, TOKENS)) * 1e3
    share = (constrained - step) / options.batch / step
    rows = [
        ("a step without constraints", f"{step:.2f} ms"),
        ("a step with a schema for each sequence", f"{constrained:.2f} ms ({constrained / step - 1:+.1%})"),
        ("for each sequence", f"{share:.2%} of a step ({verdict(share <= BAR, f'{BAR:.0%}')})"),
        ("one mask and the next token, alone", f"{mask * 1000:.0f} us, {mask / step:.2%} of a step"),
    ]
    print(f"{machine()}, {options.threads} threads\n")
    print(table((f"batch {options.batch}, weft-nano, float32", ""), rows))


if __name__ == "__main__":
    main()
