"""transformers in the CPU comparison: its forward pass with its own cache, greedy."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache

from loadtest.engine.cpu_task import Report, Task, read_task


@torch.inference_mode()
def generate(model: Any, task: Task, prompts: list[list[int]], new_tokens: int) -> tuple[list[float], list[int]]:
    """Seconds of each decode step, and the first prompt's tokens."""
    cache = DynamicCache(config=model.config)
    logits = model(torch.tensor(prompts), past_key_values=cache, logits_to_keep=1).logits
    times, tokens = [], []
    for _ in range(new_tokens - 1):
        chosen = logits[:, -1].argmax(-1, keepdim=True)
        tokens.append(int(chosen[0]))
        start = task.clock()
        logits = model(chosen, past_key_values=cache, logits_to_keep=1).logits
        times.append(task.clock() - start)
    return times, [*tokens, int(logits[0, -1].argmax())]


def main() -> None:
    """All of the task; figures on standard output."""
    task, report = read_task(), Report()
    torch.set_num_threads(task.threads)
    model = AutoModelForCausalLM.from_pretrained(task.model, dtype=getattr(torch, task.dtype))
    generate(model, task, task.prompts(1), 1)
    report.saw_first_token()
    for batch in task.batches:
        times, tokens = generate(model, task, task.prompts(batch), task.new_tokens)
        report.decoded(batch, times)
        if batch == 1:
            report.tokens = tokens
    start = task.clock()
    generate(model, task, [task.long_prompt()], 1)
    report.prefill_seconds = task.clock() - start
    report.print()


if __name__ == "__main__":
    main()
