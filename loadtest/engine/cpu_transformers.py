"""transformers in the CPU comparison: its forward pass with its own cache, greedy."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache

from loadtest.engine.cpu_task import Task, read_task, run_task


class Transformers:
    """A model in the task's dtype."""

    def __init__(self, task: Task) -> None:
        torch.set_num_threads(task.threads)
        self.clock = task.clock
        self.model: Any = AutoModelForCausalLM.from_pretrained(task.model, dtype=getattr(torch, task.dtype))

    @torch.inference_mode()
    def generate(self, prompts: list[list[int]], new_tokens: int) -> tuple[list[float], list[int]]:
        """Return the seconds of each decode step, and the first prompt's tokens."""
        cache = DynamicCache(config=self.model.config)
        logits = self.model(torch.tensor(prompts), past_key_values=cache, logits_to_keep=1).logits
        times, tokens = [], []
        for _ in range(new_tokens - 1):
            chosen = logits[:, -1].argmax(-1, keepdim=True)
            tokens.append(int(chosen[0]))
            start = self.clock()
            logits = self.model(chosen, past_key_values=cache, logits_to_keep=1).logits
            times.append(self.clock() - start)
        return times, [*tokens, int(logits[0, -1].argmax())]

    def warm_up_prefill(self) -> None:
        """Nothing is left to warm up."""


def main() -> None:
    task = read_task()
    run_task(task, lambda: Transformers(task))


if __name__ == "__main__":
    main()
