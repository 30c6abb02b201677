"""A model on the ranks of a group: the leader orders each step with a frame, and every rank executes it.

The leader alone has sequences, grammars and the sampler. Each step ends with a gather of logits, so when the leader's
part is done, all ranks have written the KV of the step.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from weft.engine.executor import ModelExecutor
from weft.engine.frames import decode, encode_logits, encode_step
from weft.engine.step_input import StepInput


class FollowerLink(Protocol):
    """Connects the leader with all of its followers."""

    def send(self, frame: bytes) -> None:
        """Send a frame to every follower, in order. Raises GroupLost if one is gone."""


class LeaderLink(Protocol):
    """Connects a follower with its leader."""

    def receive(self) -> bytes | None:
        """Wait for the next frame; None if the leader has closed the connection."""


class GroupExecutor:
    """Executes steps on all ranks: on the followers by frames, and on the leader itself."""

    def __init__(self, executor: ModelExecutor, link: FollowerLink) -> None:
        self._own, self._link = executor, link
        self._num_frames = 0

    def forward(self, step: StepInput, sampled: Tensor) -> tuple[Tensor, Tensor | None]:
        """See `ModelExecutor.forward`."""
        if step.pending_tokens:
            places, sources = np.array(step.pending_tokens).T
            rows = step.rows.copy()
            rows[0][places] = sampled[torch.from_numpy(sources)].numpy()
            step = replace(step, rows=rows, pending_tokens=[])
        # All ranks write to the new pages, so these are cleared before any of them begins.
        self._own.clear_pages(step.new_pages)
        self._send(encode_step(self._num_frames, step))
        return self._own.forward(replace(step, new_pages=[]), sampled)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits [n, vocab] float32 of hidden states that `forward` returned, from all ranks."""
        self._send(encode_logits(self._num_frames, hidden.contiguous().view(torch.uint8).numpy()))
        return self._own.logits(hidden)

    def _send(self, frame: bytes) -> None:
        self._link.send(frame)
        self._num_frames += 1


def follow(executor: ModelExecutor, link: LeaderLink, dtype: torch.dtype) -> None:
    """Execute the leader's frames until it closes the connection. Raises BadFrame, GroupLost."""
    nothing = torch.zeros(0, dtype=torch.int64)
    while (data := link.receive()) is not None:
        frame = decode(data)
        if frame.step is not None:
            executor.forward(frame.step, nothing)
        elif frame.hidden is not None:
            executor.logits(torch.from_numpy(frame.hidden.copy()).view(dtype))
