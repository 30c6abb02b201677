"""Our engine in the CPU comparison: through its public interface, times from its listener."""

from __future__ import annotations

import queue
import time
from itertools import pairwise

import torch
from safetensors.torch import load_file

from loadtest.engine.cpu_task import Task, read_task, run_task
from weft.engine.config import EngineConfig
from weft.engine.engine import Engine
from weft.engine.messages import SequenceMode, SequenceSpec, StepOutput
from weft.engine.runner import build_engine
from weft.model.config import ModelConfig, read_config
from weft.request import RequestKey, SamplingParams
from weft.worker.os_tuning import disable_malloc_trim

BLOCK_TOKENS = 16
# between llama.cpp's 512 and the whole prompt that vLLM takes
CHUNK_TOKENS = 1024


class Weft:
    """The engine in the task's dtype, from bfloat16 weights."""

    def __init__(self, task: Task) -> None:
        disable_malloc_trim()  # as a worker does
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
        self._outputs: queue.SimpleQueue[tuple[float, StepOutput]] = queue.SimpleQueue()
        self.engine = self._build(config, limits, task)
        self.engine.start()

    def _build(self, config: ModelConfig, limits: EngineConfig, task: Task) -> Engine:
        return build_engine(
            config,
            load_file(task.model / "model.safetensors"),
            dtype=task.dtype,
            device="cpu",
            engine_config=limits,
            listener=lambda output: self._outputs.put((task.clock(), output)),
            is_resident=True,  # as on a CPU worker
        )

    def generate(self, prompts: list[list[int]], new_tokens: int) -> tuple[list[float], list[int]]:
        """Return the seconds between steps in which every sequence had a token, and the first prompt's tokens."""
        names = []
        for index, prompt in enumerate(prompts):
            sampling = SamplingParams(max_tokens=new_tokens, ignore_eos=True)
            salt = bytes([index]) + time.monotonic_ns().to_bytes(8, "big")  # hits no prefix of an earlier run
            names.append(salt.hex())
            key = RequestKey(names[-1])
            self.engine.submit(SequenceSpec(key, tuple(prompt), sampling, SequenceMode.GENERATE, cache_salt=salt))
        full, first, num_open = list[float](), list[int](), len(prompts)
        while num_open:
            at, output = self._outputs.get(timeout=600)
            if output.failures:
                raise output.failures[0].error
            num_open -= sum(delta.finish_reason is not None for delta in output.deltas)
            if sum(len(delta.token_ids) for delta in output.deltas) == len(prompts):
                full.append(at)
            for delta in output.deltas:
                first += delta.token_ids if delta.key.request_id == names[0] else []
        return [end - start for start, end in pairwise(full)], first

    def warm_up_prefill(self) -> None:
        """Nothing is left to warm up."""


def main() -> None:
    task = read_task()
    engine = Weft(task)
    run_task(task, lambda: engine)
    engine.engine.stop()


if __name__ == "__main__":
    main()
