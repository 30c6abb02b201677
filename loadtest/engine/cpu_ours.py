"""Our engine in the CPU comparison: through its public face, times from what its listener hears."""

from __future__ import annotations

import queue
import time
from itertools import pairwise

import torch
from safetensors.torch import load_file

from loadtest.engine.cpu_task import Report, Task, read_task
from weft.engine.config import EngineConfig
from weft.engine.engine import Engine
from weft.engine.messages import SequenceMode, SequenceSpec, StepOutput
from weft.engine.runner import build_engine
from weft.model.config import read_config
from weft.request import RequestKey, SamplingParams
from weft.worker.os_tuning import disable_malloc_trim

BLOCK_TOKENS = 16
# between llama.cpp's 512 and the whole prompt that vLLM is given room for
CHUNK_TOKENS = 1024
Heard = queue.SimpleQueue[tuple[float, StepOutput]]


def open_engine(task: Task, heard: Heard) -> Engine:
    """In the task's dtype, from bfloat16 weights."""
    disable_malloc_trim()  # as a worker does when it boots
    torch.set_num_threads(task.threads)
    config = read_config(task.model)
    per_sequence = -(-(task.prompt_tokens + task.new_tokens) // BLOCK_TOKENS) + 1
    limits = EngineConfig(
        num_blocks=max(task.batches) * per_sequence + task.prefill_tokens // BLOCK_TOKENS + 2,
        block_tokens=BLOCK_TOKENS,
        vocab_size=config.vocab_size,
        max_context_tokens=config.max_positions,
        chunk_tokens=CHUNK_TOKENS,
        max_num_seqs=max(task.batches),
    )
    engine = build_engine(
        config,
        load_file(task.model / "model.safetensors"),
        dtype=task.dtype,
        device="cpu",
        engine_config=limits,
        listener=lambda output: heard.put((task.clock(), output)),
        is_resident=True,  # as a worker on a CPU keeps them
    )
    engine.start()
    return engine


def generate(engine: Engine, heard: Heard, prompts: list[list[int]], new_tokens: int) -> list[tuple[float, list[int]]]:
    """When each step ended and the new tokens of it, from the first to the last."""
    for index, prompt in enumerate(prompts):
        sampling = SamplingParams(max_tokens=new_tokens, ignore_eos=True)
        salt = bytes([index]) + time.monotonic_ns().to_bytes(8, "big")  # no prefix is found from an earlier run
        engine.submit(
            SequenceSpec(RequestKey(salt.hex()), tuple(prompt), sampling, SequenceMode.GENERATE, cache_salt=salt)
        )
    steps, num_open = [], len(prompts)
    while num_open:
        at, output = heard.get(timeout=600)
        if output.failures:
            raise output.failures[0].error
        num_open -= sum(delta.finish_reason is not None for delta in output.deltas)
        steps.append((at, [token for delta in output.deltas for token in delta.token_ids]))
    return steps


def main() -> None:
    """All of the task; figures on standard output."""
    task, report, heard = read_task(), Report(), Heard()
    engine = open_engine(task, heard)
    generate(engine, heard, task.prompts(1), 1)
    report.saw_first_token()
    for batch in task.batches:
        steps = generate(engine, heard, task.prompts(batch), task.new_tokens)
        if batch == 1:
            report.tokens = [token for _, tokens in steps for token in tokens]
        full = [at for at, tokens in steps if len(tokens) == batch]
        report.decoded(batch, [end - start for start, end in pairwise(full)])
    start = task.clock()
    steps = generate(engine, heard, [task.long_prompt()], 1)
    report.prefill_seconds = steps[-1][0] - start
    engine.stop()
    report.print()


if __name__ == "__main__":
    main()
