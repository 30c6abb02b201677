"""Fits the worker model to measurements: prompts alone on a mesh, and counters under load. Arithmetic only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from loadtest.fleet.machine import Machine
from weft_mesh.v1.scheduler_service_pb2 import WorkerReport

CHUNK_TOKENS = 512
# windows with less work are ignored
MIN_STEPS, MIN_PROMPT_TOKENS = 5, 128
# smallest spread of sequences per batch, and of busy others, that gives a slope
MIN_SPREADS = (1.0, 0.2)


@dataclass(frozen=True, slots=True)
class Window:
    """What one worker did between two looks: steps, prompt tokens, their seconds, and the mean of busy others."""

    steps: int
    step_seconds: float
    sequences: float
    prompt_tokens: int
    prompt_seconds: float
    others: float


@dataclass(frozen=True, slots=True)
class Look:
    """What every worker had counted at a time, in seconds."""

    at: float
    reports: dict[str, WorkerReport]


def windows(looks: Sequence[Look]) -> list[Window]:
    """Return the windows of all workers between consecutive looks."""
    found = []
    for earlier, later in pairwise(looks):
        before, after = earlier.reports, later.reports
        names = sorted(before.keys() & after.keys())
        busy = {name: _busy(after[name]) - _busy(before[name]) for name in names}
        for name in names:
            old, new = before[name], after[name]
            steps = max(new.generating_steps - old.generating_steps, 0)
            found.append(
                Window(
                    steps,
                    (new.generating_seconds - old.generating_seconds) / max(steps, 1),
                    (new.generating_sequences - old.generating_sequences) / max(steps, 1),
                    new.computed_prompt_tokens - old.computed_prompt_tokens,
                    new.computing_seconds - old.computing_seconds,
                    (sum(busy.values()) - busy[name]) / (later.at - earlier.at),
                )
            )
    return found


def _busy(report: WorkerReport) -> float:
    return report.generating_seconds + report.computing_seconds


def prompt_cost(alone: Sequence[tuple[int, float]]) -> tuple[float, float, float]:
    """Return seconds of a prompt besides its tokens, per token, and per token for each token before it."""
    tokens, seconds = (np.array(column, dtype=float) for column in zip(*alone, strict=True))
    columns = np.stack([np.ones_like(tokens), tokens, tokens**2 / 2], axis=1)
    besides, a_token, pair = np.linalg.lstsq(columns, seconds, rcond=None)[0]
    return float(besides), float(a_token), float(pair)


def fit(alone: Sequence[tuple[int, float]], itl_alone: float, seen: Sequence[Window], kv_tokens: int) -> Machine:
    """Fit the model. `alone`: tokens and seconds to the first token of prompts that had the mesh to themselves.

    `itl_alone`: seconds between two tokens of an answer that had it to itself.
    """
    besides, a_token, pair = prompt_cost(alone)
    mean = float(np.mean([tokens for tokens, _ in alone]))
    generated = [window for window in seen if window.steps >= MIN_STEPS]
    base, sequence, step_beside = _line(
        [window.step_seconds for window in generated],
        [(1.0, window.sequences, window.others) for window in generated],
        [window.steps for window in generated],
    )
    computed = [window for window in seen if window.prompt_tokens >= MIN_PROMPT_TOKENS]
    under_load, token_beside = _line(
        [window.prompt_seconds / window.prompt_tokens for window in computed],
        [(1.0, window.others) for window in computed],
        [window.prompt_tokens for window in computed],
    )
    # a prompt's time includes a step's fixed part and attention
    prompt_token = under_load - max(base, 0.0) / CHUNK_TOKENS - max(pair, 0.0) * mean / 2
    return Machine(
        name="this machine",
        base=max(itl_alone - sequence, base, 1e-5),  # a client also sees the time between two steps
        sequence=sequence,
        kv_token=0.0,
        prompt_token=max(prompt_token, 1e-7),
        pair=max(pair, 0.0),
        chunk_tokens=CHUNK_TOKENS,
        kv_tokens=kv_tokens,
        handoff=max(besides - base, 0.0),
        handoff_token=max(a_token - under_load, 0.0),
        store_token=0.0,
        dollars_per_hour=0.0,
        source="fitted to a short measurement by loadtest.fleet.calibrate",
        step_beside=step_beside,
        token_beside=token_beside,
    )


def _line(values: Sequence[float], of: Sequence[tuple[float, ...]], weights: Sequence[float]) -> list[float]:
    """Weighted least squares; factors after the first are at least 0, and 0 if their input hardly varies."""
    columns, by = np.array(of), np.sqrt(np.array(weights))
    used = [0, *(n for n in range(1, columns.shape[1]) if np.ptp(columns[:, n]) >= MIN_SPREADS[n - columns.shape[1]])]
    while True:
        found = np.linalg.lstsq(columns[:, used] * by[:, None], np.array(values) * by, rcond=None)[0]
        if all(factor >= 0.0 for factor in found[1:]):
            break
        used.pop(1 + int(np.argmin(found[1:])))
    factors = [0.0] * columns.shape[1]
    for n, factor in zip(used, found, strict=True):
        factors[n] = float(factor)
    return factors
