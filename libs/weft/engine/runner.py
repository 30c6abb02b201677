"""Turns scheduled chunks into sampled tokens: builds the step's input, executes it, processes logits and samples.

Only this process has sequences and sampling parameters; the executor receives numbers. Nothing here waits for the
device.
"""

from __future__ import annotations

from collections.abc import Sequence as Items

import torch
from torch import Tensor

from weft.engine.config import EngineConfig
from weft.engine.device_copy import DeviceCopier
from weft.engine.executor import ModelExecutor
from weft.engine.logits_processor import LogitsProcessor, SampledPosition
from weft.engine.messages import PoolMemory
from weft.engine.sampler import LaunchedStep, Sampler
from weft.engine.step_input import StepInput, StepInputBuilder
from weft.engine.step_scheduler import ScheduledChunk
from weft.model.decoder import Decoder

Spans = list[tuple[int, int]]


class ModelRunner:
    """Runs one model on one device; see `weft.engine.loop.Runner`."""

    def __init__(self, model: Decoder, config: EngineConfig, dtype: str, device: torch.device) -> None:
        copier = DeviceCopier(device)
        self.executor = ModelExecutor(model, config, dtype, copier)
        self._builder = StepInputBuilder(config.paging)
        self._processor = LogitsProcessor(config.vocab_size, config.eos_token_ids, copier)
        self._sampler = Sampler(copier)

    @property
    def pool_memory(self) -> PoolMemory:
        """Location of the block pool."""
        return self.executor.pool_memory

    def launch(self, chunks: Items[ScheduledChunk]) -> LaunchedStep:
        """Begin to compute the KV of all chunks and their samples, after all steps launched before.

        Single tokens come first and are sorted by context length, because attention groups neighbours.
        """
        order = sorted(range(len(chunks)), key=lambda i: (chunks[i].num_tokens > 1, -chunks[i].start))
        ordered = [chunks[i] for i in order]
        spans: Spans = [(0, 0)] * len(chunks)
        num_rows = 0
        for i, chunk in zip(order, ordered, strict=True):
            spans[i] = (num_rows, num_rows := num_rows + chunk.num_samples)
        return self._execute(ordered, self._builder.build(ordered), spans)

    @torch.inference_mode()
    def _execute(self, chunks: Items[ScheduledChunk], step: StepInput, spans: Spans) -> LaunchedStep:
        logits, hidden = self.executor.forward(step, self._sampler.last)
        if hidden is not None:
            self._notify_observers([chunk for chunk in chunks if chunk.has_observer], hidden)
        rows = [SampledPosition(chunk.sequence, at) for chunk in chunks for at in chunk.sampled_positions]
        shaped, failures = self._processor.apply(rows, logits)
        params = [row.sequence.spec.sampling for row in rows]
        return self._sampler.launch(logits, shaped, params, [row.position for row in rows], spans, failures)

    def _notify_observers(self, chunks: Items[ScheduledChunk], hidden: Tensor) -> None:
        for chunk, rows in zip(chunks, torch.split(hidden, [chunk.num_tokens for chunk in chunks]), strict=True):
            if (observer := chunk.sequence.spec.observer) is not None:
                observer.observe(chunk.start, rows, self.executor.logits)
