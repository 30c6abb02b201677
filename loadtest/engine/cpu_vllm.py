"""vLLM's CPU build in the comparison: its engine in this process, compiled, stepped by us, greedy.

Runs in an environment of its own (`loadtest/engine/peers.sh vllm VENV`). Without Intel's OpenMP loaded first its matrix
products use one core, so the process starts itself again with that library, and tcmalloc where there is one, preloaded.
"""

from __future__ import annotations

import glob
import os
import sys
from collections.abc import Mapping
from typing import Any

from loadtest.engine.cpu_task import Task, read_task, run_task

PRELOADED = ("{prefix}/lib/libiomp5.so", "/usr/lib/*/libtcmalloc_minimal.so.4")
MARK = "WEFT_BENCH_VLLM_IS_PRELOADED"


def environment(prefix: str, threads: int) -> dict[str, str]:
    """Return the preloaded libraries of an environment at `prefix`, and the settings of vLLM's manual for CPUs."""
    libraries = [path for pattern in PRELOADED for path in glob.glob(pattern.format(prefix=prefix))]
    return {
        "LD_PRELOAD": ":".join(libraries),
        "OMP_NUM_THREADS": str(threads),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }


def start_again(threads: int) -> None:
    """Replace this process with one that has these settings, and the engine in it."""
    settings = {**environment(sys.prefix, threads), MARK: "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    os.execve(sys.executable, [sys.executable, "-m", "loadtest.engine.cpu_vllm", *sys.argv[1:]], os.environ | settings)


class Vllm:
    """An engine for the task's largest batch, stepped by its caller."""

    def __init__(self, task: Task) -> None:
        from vllm import EngineArgs, LLMEngine

        self.clock = task.clock
        longest = max(task.prompt_tokens + task.new_tokens, task.prefill_tokens) + 16
        arguments = EngineArgs(
            model=str(task.model),
            dtype=task.dtype,
            skip_tokenizer_init=True,
            max_model_len=longest,
            max_num_seqs=max(task.batches),
            max_num_batched_tokens=max(2048, longest),
            enable_prefix_caching=False,
            disable_log_stats=True,
        )
        self.engine: Any = LLMEngine.from_engine_args(arguments)
        self.num_requests = 0

    def generate(self, prompts: list[list[int]], new_tokens: int) -> tuple[list[float], list[int]]:
        """Return the seconds of each step in which all sequences generate, and the first prompt's tokens."""
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
        names = [f"request-{self.num_requests + index}" for index in range(len(prompts))]
        self.num_requests += len(prompts)
        for name, prompt in zip(names, prompts, strict=True):
            self.engine.add_request(name, {"prompt_token_ids": prompt}, sampling)
        times: list[float] = []
        tokens: Mapping[str, list[int]] = {}
        while self.engine.has_unfinished_requests():
            counts = {name: len(ids) for name, ids in tokens.items()}
            start = self.clock()
            outputs = self.engine.step()
            took = self.clock() - start
            tokens = {**tokens, **{each.request_id: list(each.outputs[0].token_ids) for each in outputs}}
            if len(counts) == len(names) and all(len(tokens[name]) == counts[name] + 1 for name in names):
                times.append(took)
        return times, tokens[names[0]]

    def warm_up_prefill(self) -> None:
        """Nothing is left to warm up."""


def main() -> None:
    task = read_task()
    if MARK not in os.environ:
        start_again(task.threads)
    run_task(task, lambda: Vllm(task))


if __name__ == "__main__":
    main()
