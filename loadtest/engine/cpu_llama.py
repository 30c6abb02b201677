"""llama.cpp in the CPU comparison, through its C interface: all sequences in one batch a step, greedy.

Runs in an environment of its own, with llama-cpp-python, gguf and numpy, and writes the model as GGUF beside the
checkpoint the first time.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np

from loadtest.engine.cpu_task import VOCAB_SIZE, Task, read_task, run_task
from loadtest.engine.gguf_model import convert

MIN_ROWS = 2048  # of a call, llama.cpp's default; more where a prompt is longer


class Llama:
    """A model, and a context for some sequences of one length.

    Keys and values lie in one buffer (`is_unified`), where a row's attention passes over those of all sequences, or in
    one for each sequence. Which is quicker depends on the batch.
    """

    def __init__(self, task: Task, path: Path) -> None:
        self.task = task
        self.max_rows = max(MIN_ROWS, task.prompt_tokens, task.prefill_tokens, *task.batches)
        llama_cpp.llama_backend_init()
        self.model = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
        self.batch = llama_cpp.llama_batch_init(self.max_rows, 0, 1)
        self.context: Any = None
        self.is_prefill_ready = False

    def open(self, sequences: int, tokens: int, *, is_unified: bool) -> None:
        """Replace the context."""
        if self.context is not None:
            llama_cpp.llama_free(self.context)
        params = llama_cpp.llama_context_default_params()
        params.n_seq_max = sequences
        params.n_ctx = sequences * -(-tokens // 256) * 256  # whole steps for each
        params.n_batch, params.n_ubatch = self.max_rows, 512
        params.n_threads = params.n_threads_batch = self.task.threads
        params.kv_unified = is_unified
        self.context = llama_cpp.llama_init_from_model(self.model, params)
        if not self.context:
            raise RuntimeError(f"no context for {sequences} sequences of {tokens} tokens")

    def run(self, tokens: list[tuple[int, int, int, bool]]) -> list[int]:
        """Take (token, position, sequence, wants logits); return the best next token of those that want logits."""
        self.batch.n_tokens = len(tokens)
        for index, (token, position, sequence, is_wanted) in enumerate(tokens):
            self.batch.token[index], self.batch.pos[index] = token, position
            self.batch.n_seq_id[index], self.batch.seq_id[index][0] = 1, sequence
            self.batch.logits[index] = is_wanted
        if llama_cpp.llama_decode(self.context, self.batch):
            raise RuntimeError("llama_decode failed")
        wanted = [index for index, each in enumerate(tokens) if each[3]]
        rows = [llama_cpp.llama_get_logits_ith(self.context, index) for index in wanted]
        return [int(np.ctypeslib.as_array(row, shape=(VOCAB_SIZE,)).argmax()) for row in rows]

    def generate(self, prompts: list[list[int]], new_tokens: int) -> tuple[list[float], list[int]]:
        """Return the quicker of both buffers; the long prompt has a context already."""
        if self.is_prefill_ready:
            return self._generate(prompts, new_tokens)
        found = []
        for is_unified in (True, False)[: len(prompts)]:
            self.open(len(prompts), self.task.prompt_tokens + self.task.new_tokens, is_unified=is_unified)
            found.append(self._generate(prompts, new_tokens))
        return min(found, key=lambda each: statistics.median(each[0] or [0]))

    def warm_up_prefill(self) -> None:
        """Touch a new context's memory for the first time."""
        self.open(1, self.task.prefill_tokens + 1, is_unified=True)
        self._generate([self.task.long_prompt()[:512]], 1)
        self.is_prefill_ready = True

    def _generate(self, prompts: list[list[int]], new_tokens: int) -> tuple[list[float], list[int]]:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.context), True)
        last = []
        for sequence, prompt in enumerate(prompts):
            end = len(prompt) - 1
            last += self.run([(token, at, sequence, at == end) for at, token in enumerate(prompt)])
        times, first = [], last[:1]
        for step in range(new_tokens - 1):
            start = self.task.clock()
            last = self.run([(token, len(prompts[i]) + step, i, True) for i, token in enumerate(last)])
            times.append(self.task.clock() - start)
            first.append(last[0])
        return times, first


def main() -> None:
    task, began = read_task(), time.perf_counter()
    path = convert(task.model, task.dtype)
    run_task(task, lambda: Llama(task, path), time.perf_counter() - began)


if __name__ == "__main__":
    main()
