"""Turns scheduled chunks into sampled tokens: builds the step's input, executes it, processes logits and samples.

Only this process has sequences and sampling parameters; the executor receives numbers. Nothing here waits for the
device.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Items
from dataclasses import replace
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from weft.engine.config import EngineConfig
from weft.engine.device_copier import DeviceCopier
from weft.engine.drafting.drafter import Speculator
from weft.engine.engine import Engine
from weft.engine.executor import DTYPES, ModelExecutor
from weft.engine.group import FollowerLink, GroupExecutor
from weft.engine.head_drafter import HeadDrafter
from weft.engine.head_planner import HeadPlanner
from weft.engine.messages import PoolMemory, StepOutput
from weft.engine.page_slots import attention_context, slots
from weft.engine.sampler import LaunchedStep, LogitsProcessor, SampledPosition, Sampler
from weft.engine.sequence import Sequence
from weft.engine.step_input import StepInput
from weft.engine.step_scheduler import ScheduledChunk
from weft.kv.layer_groups import PagingPolicy
from weft.model.config import ModelConfig
from weft.model.decoder import Decoder
from weft.model.draft import DraftModel
from weft_kernels.native import release_threads


class StepInputBuilder:
    """Builds the inputs of consecutive steps, and remembers which row of a step sampled each sequence's last token."""

    def __init__(self, paging: PagingPolicy, num_blocks: int = 0) -> None:
        """`num_blocks`: blocks of the pool, behind which scratch blocks lie."""
        self._paging = paging
        self._first_scratch_slot = num_blocks * paging.block_tokens
        self._block_tokens = paging.block_tokens
        self._sampled_rows: dict[Sequence, int] = {}

    def build(self, chunks: Items[ScheduledChunk], boundaries: Items[ScheduledChunk] = ()) -> StepInput:
        """Pack the chunks in their order. Call it once for each step, in the order of the steps.

        `boundaries`: of these chunks the token before is computed once more, in a row of its own at the beginning.
        """
        rows: list[list[int]] = [[], [], *([] for _ in self._paging.spans)]
        token_ids, positions, *slots_of = rows
        logit_rows: list[int] = []
        pending_tokens: list[tuple[int, int]] = []
        hidden_rows: list[int] = []
        sampled_rows: dict[Sequence, int] = {}
        for place, chunk in enumerate(boundaries):
            token_ids.append(chunk.sequence.token_ids[chunk.start - 1])
            positions.append(chunk.start - 1)
            for of_group in slots_of:
                of_group.append(self._first_scratch_slot + place)
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
            for run, of_group in zip(sequence.page_ranges, slots_of, strict=True):
                of_group += slots(run, start, end, self._block_tokens)
            if chunk.num_samples:
                logit_rows += range(len(token_ids) - chunk.num_samples, len(token_ids))
                sampled_rows[sequence] = len(logit_rows) - 1
            if chunk.has_observer:
                hidden_rows += range(len(token_ids) - chunk.num_tokens, len(token_ids))
        self._sampled_rows = sampled_rows
        counts = [*(1 for _ in boundaries), *(chunk.num_tokens for chunk in chunks)]
        contexts = [self._contexts(chunks, boundaries, group) for group in range(len(self._paging.spans))]
        return StepInput(
            rows=np.array(rows, dtype=np.int64),
            pending_tokens=pending_tokens,
            logit_rows=logit_rows,
            starts=list(accumulate(counts, initial=0)),
            decodes=[*(True for _ in boundaries), *(chunk.is_decode for chunk in chunks)],
            lens=[[length for length, _ in each] for each in contexts],
            tables=[[table for _, table in each] for each in contexts],
            hidden_rows=hidden_rows,
            new_pages=self._new_pages(chunks),
        )

    def _new_pages(self, chunks: Items[ScheduledChunk]) -> list[int]:
        new_pages: list[int] = []
        for chunk in chunks:
            index, num_filled = divmod(chunk.start + chunk.num_tokens, self._block_tokens)
            if num_filled and index * self._block_tokens >= chunk.start:
                ranges = chunk.sequence.page_ranges
                new_pages += [page for run in ranges if (page := run.page(index)) is not None]
        return new_pages

    def _contexts(
        self, chunks: Items[ScheduledChunk], boundaries: Items[ScheduledChunk], group: int
    ) -> list[tuple[int, tuple[int, ...]]]:
        """Return length and page table of each row's or chunk's context."""
        ends = [(chunk.sequence, chunk.start) for chunk in boundaries]
        ends += [(chunk.sequence, chunk.start + chunk.num_tokens) for chunk in chunks]
        return [attention_context(self._paging, group, each.page_ranges[group], end) for each, end in ends]


Spans = list[tuple[int, int]]


class ModelRunner:
    """Runs one model on one device; see `weft.engine.loop.Runner`."""

    def __init__(
        self,
        model: Decoder,
        config: EngineConfig,
        dtype: str,
        device: torch.device,
        head: DraftModel | None = None,
        *,
        followers: FollowerLink | None = None,
    ) -> None:
        """`head`: a draft model with its layer in the `drafts` of the model's config. `followers`: ranks that compute
        with this one.
        """
        copier = DeviceCopier(device)
        self.executor = ModelExecutor(model, config, dtype, copier, head)
        self._on_all: ModelExecutor | GroupExecutor = self.executor
        if followers is not None:
            self._on_all = GroupExecutor(self.executor, followers)
        self._builder = StepInputBuilder(config.paging, config.num_blocks)
        self._processor = LogitsProcessor(config.vocab_size, config.eos_token_ids, copier)
        self._sampler = Sampler(copier)
        self._is_direct = copier.is_direct
        self._head_planner = None if head is None else HeadPlanner(config, head.place[0])

    @property
    def drafter(self) -> HeadDrafter | None:
        """Drafts with the head, if there is one."""
        if self._head_planner is None or self.executor.head is None:
            return None
        return HeadDrafter(self._head_planner, self.executor.head, self._sampler.rows_of, self.executor.head_graphs)

    @property
    def pool_memory(self) -> PoolMemory:
        """Location of the block pool."""
        return self.executor.pool_memory

    def launch(self, chunks: Items[ScheduledChunk]) -> LaunchedStep:
        """Begin to compute the KV of all chunks and their samples, after all steps launched before.

        Single tokens come first, then tokens with drafts. Both are sorted by context length, because attention groups
        neighbours.
        """
        started_at = time.thread_time()
        order = sorted(range(len(chunks)), key=lambda i: _launch_order(chunks[i]))
        ordered = [chunks[i] for i in order]
        spans: Spans = [(0, 0)] * len(chunks)
        num_rows = 0
        for i, chunk in zip(order, ordered, strict=True):
            spans[i] = (num_rows, num_rows := num_rows + chunk.num_samples)
        step = self._execute(ordered, self._build(ordered), spans)
        return replace(step, work_seconds=time.thread_time() - started_at) if self._is_direct else step

    def _build(self, chunks: Items[ScheduledChunk]) -> StepInput:
        planner = self._head_planner
        if planner is None:
            return self._builder.build(chunks)
        boundaries = planner.boundaries(chunks)
        step = self._builder.build(chunks, boundaries)
        new_pages = [page for page in step.new_pages if page not in planner.zeroed] + planner.unfilled_pages(chunks)
        return replace(step, head=planner.plan(chunks, step.starts, boundaries), new_pages=new_pages)

    @torch.inference_mode()
    def _execute(self, chunks: Items[ScheduledChunk], step: StepInput, spans: Spans) -> LaunchedStep:
        logits, hidden = self._on_all.forward(step, self._sampler.last)
        if hidden is not None:
            self._notify_observers([chunk for chunk in chunks if chunk.has_observer], hidden)
        rows = [row for chunk in chunks for row in _sampled_positions(chunk)]
        shaped, failures = self._processor.apply(rows, logits)
        params = [row.sequence.spec.sampling for row in rows]
        return self._sampler.launch(logits, shaped, params, [row.position for row in rows], spans, failures)

    def _notify_observers(self, chunks: Items[ScheduledChunk], hidden: Tensor) -> None:
        for chunk, rows in zip(chunks, torch.split(hidden, [chunk.num_tokens for chunk in chunks]), strict=True):
            if (observer := chunk.sequence.spec.observer) is not None:
                observer.observe(chunk.start, rows, self._on_all.logits)


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
    head: DraftModel | None = None,
    followers: FollowerLink | None = None,
) -> Engine:
    """Build an engine around a loaded model. This thread must not use the models afterwards.

    `head`: a draft model. Its layer is part of the model's `drafts` and thus of every page, so all engines that
    exchange KV need the same one, also those that do not speculate. `followers`: the other ranks of a group.
    """
    release_threads()
    runner = ModelRunner(model, config, dtype, model.device, head, followers=followers)
    if speculator is not None and (drafter := runner.drafter) is not None:
        speculator.set_head(drafter)
    return Engine(runner, config, listener, clock, speculator)
