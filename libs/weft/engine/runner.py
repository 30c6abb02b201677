"""Turns scheduled chunks into sampled tokens: builds the step's input, executes it, processes logits and samples.

Only this process has sequences and sampling parameters; the executor receives numbers. Nothing here waits for the
device.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as Items
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from weft.engine.config import EngineConfig
from weft.engine.drafting.drafter import Speculator
from weft.engine.engine import Engine
from weft.engine.executor import DTYPES, DeviceCopier, ModelExecutor, StepInput, Tables
from weft.engine.messages import PoolMemory, StepOutput
from weft.engine.sampler import LaunchedStep, LogitsProcessor, SampledPosition, Sampler
from weft.engine.sequence import Sequence
from weft.engine.step_scheduler import ScheduledChunk
from weft.kv.layer_groups import PageRange, PagingPolicy
from weft.model.config import ModelConfig
from weft.model.decoder import Decoder
from weft_kernels.native import release_threads


class StepInputBuilder:
    """Builds the inputs of consecutive steps, and remembers which row of a step sampled each sequence's last token."""

    def __init__(self, paging: PagingPolicy) -> None:
        self._paging = paging
        self._block_tokens = paging.block_tokens
        self._sampled_rows: dict[Sequence, int] = {}

    def build(self, chunks: Items[ScheduledChunk]) -> StepInput:
        """Pack the chunks in their order. Call it once for each step, in the order of the steps."""
        rows: list[list[int]] = [[], [], *([] for _ in self._paging.spans)]
        token_ids, positions, *slots = rows
        logit_rows: list[int] = []
        pending_tokens: list[tuple[int, int]] = []
        hidden_rows: list[int] = []
        new_pages: list[int] = []
        sampled_rows: dict[Sequence, int] = {}
        for chunk in chunks:
            sequence, start, end = chunk.sequence, chunk.start, chunk.start + chunk.num_tokens
            if start == len(sequence.token_ids):
                pending_tokens.append((len(token_ids), self._sampled_rows[sequence]))
                token_ids.append(0)
            else:
                token_ids += sequence.token_ids[start:end]
                if chunk.drafts:
                    token_ids += chunk.draft_ids
            positions += range(start, end)
            for run, of_group in zip(sequence.page_ranges, slots, strict=True):
                of_group += self._slots(run, start, end)
            if chunk.num_samples:
                logit_rows += range(len(token_ids) - chunk.num_samples, len(token_ids))
                sampled_rows[sequence] = len(logit_rows) - 1
            if chunk.has_observer:
                hidden_rows += range(len(token_ids) - chunk.num_tokens, len(token_ids))
            index, num_filled = divmod(end, self._block_tokens)
            if num_filled and index * self._block_tokens >= start:
                new_pages += [page for run in sequence.page_ranges if (page := run.page(index)) is not None]
        self._sampled_rows = sampled_rows
        starts = list(accumulate((chunk.num_tokens for chunk in chunks), initial=0))
        contexts = [self._contexts(chunks, group) for group in range(len(self._paging.spans))]
        return StepInput(
            rows=np.array(rows, dtype=np.int64),
            pending_tokens=pending_tokens,
            logit_rows=logit_rows,
            starts=starts,
            decodes=[chunk.is_decode for chunk in chunks],
            lens=[each[0] for each in contexts],
            tables=[each[1] for each in contexts],
            hidden_rows=hidden_rows,
            new_pages=new_pages,
        )

    def _slots(self, run: PageRange, start: int, end: int) -> Iterable[int]:
        """Return the KV slots of consecutive positions."""
        size = self._block_tokens
        first, last = start // size, (end - 1) // size
        if first == last:  # as in nearly all decode steps
            slot = run.blocks[first - run.first] * size + start % size
            return range(slot, slot + end - start)
        return self._slots_of_blocks(run, start, end)

    def _slots_of_blocks(self, run: PageRange, start: int, end: int) -> Iterator[int]:
        size = self._block_tokens
        for index in range(start // size, -(-end // size)):
            shift = (run.blocks[index - run.first] - index) * size
            yield from range(max(start, index * size) + shift, min(end, (index + 1) * size) + shift)

    def _contexts(self, chunks: Items[ScheduledChunk], group: int) -> tuple[list[int], Tables]:
        """Return length and page table of each chunk's context.

        A context begins at the group's first page or slightly before it. Attention needs only distances between
        positions, and positions relative to aligned chunks, so earlier pages are left out.
        """
        lens: list[int] = []
        tables: Tables = []
        for chunk in chunks:
            run = chunk.sequence.page_ranges[group]
            num_skipped = self._paging.skipped_blocks(group, run.first)
            lens.append(chunk.start + chunk.num_tokens - num_skipped * self._block_tokens)
            tables.append(run.blocks[:1] * (run.first - num_skipped) + run.blocks)
        return lens, tables


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

        Single tokens come first, then tokens with drafts. Both are sorted by context length, because attention groups
        neighbours.
        """
        order = sorted(range(len(chunks)), key=lambda i: _launch_order(chunks[i]))
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
        rows = [row for chunk in chunks for row in _sampled_positions(chunk)]
        shaped, failures = self._processor.apply(rows, logits)
        params = [row.sequence.spec.sampling for row in rows]
        return self._sampler.launch(logits, shaped, params, [row.position for row in rows], spans, failures)

    def _notify_observers(self, chunks: Items[ScheduledChunk], hidden: Tensor) -> None:
        for chunk, rows in zip(chunks, torch.split(hidden, [chunk.num_tokens for chunk in chunks]), strict=True):
            if (observer := chunk.sequence.spec.observer) is not None:
                observer.observe(chunk.start, rows, self.executor.logits)


def _launch_order(chunk: ScheduledChunk) -> tuple[bool, bool, int]:
    return chunk.num_tokens > 1, not chunk.drafts, -chunk.start


def _sampled_positions(chunk: ScheduledChunk) -> list[SampledPosition]:
    if not chunk.drafts:
        return [SampledPosition(chunk.sequence, at) for at in chunk.sampled_positions]
    drafts = tuple(chunk.draft_ids)
    return [SampledPosition(chunk.sequence, at, drafts[:i]) for i, at in enumerate(chunk.sampled_positions)]


def build_engine(
    model_config: ModelConfig,
    weights: Mapping[str, Tensor],
    *,
    dtype: str,
    device: str,
    engine_config: EngineConfig,
    listener: Callable[[StepOutput], None],
    is_resident: bool = False,
    clock: Callable[[], float] = time.monotonic,
    speculator: Speculator | None = None,
) -> Engine:
    """Build an engine that is not started. dtype: "float32" or "bfloat16", for weights, activations and KV.

    `is_resident`: see `Decoder`. `speculator`: without one, sequences never draft. Tensors of another dtype or device
    are copied; `weights` is not kept.
    Raises BadCheckpoint for missing tensors.
    """
    model = Decoder(model_config, weights, DTYPES[dtype], torch.device(device), is_resident)
    return assemble(model, dtype, engine_config, listener, clock, speculator=speculator)


def assemble(
    model: Decoder,
    dtype: str,
    config: EngineConfig,
    listener: Callable[[StepOutput], None],
    clock: Callable[[], float] = time.monotonic,
    *,
    speculator: Speculator | None = None,
) -> Engine:
    """Build an engine around a loaded model. This thread must not use the model afterwards."""
    release_threads()
    return Engine(ModelRunner(model, config, dtype, model.device), config, listener, clock, speculator)
