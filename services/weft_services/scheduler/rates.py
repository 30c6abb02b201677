"""How fast a model's workers are and what its store saves them, from what their reports add up to. Chooses nothing."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from weft.request import WorkerRole
from weft_services.scheduler.served import Served
from weft_services.scheduler.speed import DEFAULT_DECODE_RATE, DEFAULT_PREFILL_RATE, Credit, credit_of
from weft_services.scheduler.state import Worker, WorkerReport

# less computing than this by all workers together says nothing of how fast they are
MIN_RATED_SECONDS = 0.2


def measure(worker: Worker, report: WorkerReport) -> None:
    """Update the worker's speed from two reports in a row: by the time in which it had work, as it counts itself."""
    before, speed = worker.report, worker.speed
    old, new = before.tallies.work, report.tallies.work
    prompts = report.computed_prompt_tokens - before.computed_prompt_tokens
    speed.measure_prefill(prompts, new.computing_seconds - old.computing_seconds)
    tokens, steps = report.generated_tokens - before.generated_tokens, new.generating_steps - old.generating_steps
    speed.measure_decode(tokens, steps, new.generating_seconds - old.generating_seconds)
    was, found = before.tallies.prefix, report.tallies.prefix
    speed.memory.add(found.dram_tokens - was.dram_tokens, found.dram_seconds - was.dram_seconds)
    speed.disk.add(found.nvme_tokens - was.nvme_tokens, found.nvme_seconds - was.nvme_seconds)


def rate(served: Served) -> None:
    """Tell the policy how fast each worker is, beside the others, and what a token in the store is worth to them."""
    workers = served.workers
    # those that only decode compute a few tokens of a prompt at a time, at the price of a step
    computing = [worker for worker in workers if worker.info.role.can(WorkerRole.PREFILL)] or workers
    tokens = sum(worker.speed.prompt_tokens for worker in computing)
    seconds = sum(worker.speed.prompt_seconds for worker in computing)
    usual = tokens / seconds if seconds > MIN_RATED_SECONDS else DEFAULT_PREFILL_RATE
    decode = [worker.speed.decode_rate for worker in workers if worker.speed.decode_rate]
    mean_decode = fmean(decode) if decode else 1.0
    for worker in workers:
        worker.token_seconds = 1.0 / worker.speed.prefill_rate(usual)
        # a sequence's speed falls with load, so only its ratio to the other workers' says how fast the machine is
        worker.decode_token_seconds = mean_decode / (worker.speed.decode_rate or mean_decode) / DEFAULT_DECODE_RATE
        worker.refresh()
    served.credit = _credit(computing, usual)


def _credit(workers: Sequence[Worker], prefill_rate: float) -> Credit:
    speeds = [worker.speed for worker in workers]
    return credit_of([speed.memory for speed in speeds], [speed.disk for speed in speeds], prefill_rate)
