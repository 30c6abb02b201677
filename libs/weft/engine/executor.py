"""Runs the model on one device: KV pool, CUDA graphs, copies and forward pass.

Takes only the numbers of a `StepInput`, so that every rank of a group can execute the same step.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from weft.engine.config import EngineConfig
from weft.engine.device_copier import Array, DeviceCopier
from weft.engine.head_executor import HeadExecutor
from weft.engine.head_planner import HeadStep, max_step_rows, num_feature_places
from weft.engine.messages import PoolMemory
from weft.engine.page_slots import Tables
from weft.kv.memfd import create_shared_memory
from weft.model.decoder import Decoder
from weft.model.draft import DraftModel
from weft.model.kv_layout import block_bytes, group_heads, kv_groups, units
from weft.model.paged_pool import paged_pool
from weft.model.step import TokenBatch
from weft_kernels.cuda_graphs import GraphRecorder
from weft_kernels.layer_cache import PagedPool
from weft_kernels.paged_attention import PagedBatch, PagedTensors, aligned, resident_batch

PAGE_BYTES = 4096
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# Beyond this many rows a step's launches take less time than its work.
MAX_SIZE = 256


@dataclass(frozen=True, slots=True)
class StepInput:
    """One step: T rows (tokens) of S chunks, in G groups of layers. It holds only numbers, so any rank can execute it.

    - `rows` [2 + G, T] int64: token ids, positions, and the KV slot in each group.
    - `pending_tokens`: pairs (row, index). The host does not know the row's token yet; it is at this index among the
      tokens that the previous step sampled.
    - `logit_rows` [R]: rows to compute logits for, one for each sampled position.
    - `hidden_rows` [H]: rows that an observer wants the hidden states of.
    - `starts` [S + 1]: first row of each chunk. `decodes` [S], `lens` [G][S], `tables` [G][S]: see `PagedBatch`.
    - `new_pages`: pages that this step begins and does not fill. They must be zeroed first, because attention reads
      the rest of the page under a mask, and numbers of the last owner may be NaN.
    - `head`: the part of the draft model, if there is one.
    """

    rows: Array
    pending_tokens: list[tuple[int, int]]
    logit_rows: list[int]
    starts: list[int]
    decodes: list[bool]
    lens: list[list[int]]
    tables: list[Tables]
    hidden_rows: list[int]
    new_pages: list[int]
    head: HeadStep | None = None

    @property
    def is_decode(self) -> bool:
        """True if every chunk is one token and samples one token."""
        return len(self.logit_rows) == len(self.starts) - 1 == self.starts[-1] and not self.hidden_rows


class ModelExecutor:
    """One model on one device with its block pool. No method waits for the device."""

    def __init__(
        self,
        model: Decoder,
        config: EngineConfig,
        dtype: str,
        copier: DeviceCopier,
        head: DraftModel | None = None,
    ) -> None:
        """`head`: a draft model with its layer in the model's pages."""
        if config.has_draft_layer != bool(model.config.drafts) or bool(model.config.drafts) != (head is not None):
            raise ValueError("drafts: model, engine and draft model must agree on whether there is a draft layer")
        groups = kv_groups(model.config)
        if groups.spans != config.spans:
            raise ValueError(f"spans: the model has {groups.spans}, but the engine has {config.spans}")
        self._model = model
        self._copier = copier
        size = block_bytes(model.config, dtype, config.block_tokens)
        num_blocks = config.num_blocks + num_scratch_blocks(config)
        # Transfer engines register whole pages of memory, so the pool starts at a page boundary. It starts as zeros:
        # attention multiplies masked values too, and 0 times NaN is NaN.
        num_bytes = num_blocks * size + PAGE_BYTES
        shared = create_shared_memory(num_bytes, "weft-kv-pool") if copier.device.type == "cpu" else None
        if shared is None:
            memory = torch.zeros(num_bytes, dtype=torch.uint8, device=copier.device)
        else:
            memory = torch.frombuffer(shared.mapping, dtype=torch.uint8)
        offset = -memory.data_ptr() % PAGE_BYTES
        pages = memory[offset : offset + num_blocks * size].view(DTYPES[dtype]).view(num_blocks, -1)
        self.pool = paged_pool(model.config, pages, config.block_tokens)
        # Page-aligned and contiguous.
        self.pool_memory = PoolMemory(
            address=pages.data_ptr(),
            block_bytes=size,
            num_blocks=config.num_blocks,
            shared_fd=shared.fd if shared else None,
            units=tuple(units(model.config, group, dtype, config.block_tokens) for group in range(len(groups.groups))),
        )
        self.head = None
        if head is not None:
            sizes = num_feature_places(config), max_step_rows(config)
            self.head = HeadExecutor(head, self.pool, sizes, copier, model.config.hidden_size)
        self.graphs = DecodeGraphs(model, self.pool, config, copier, self.head) if config.decode_graphs else None

    @torch.inference_mode()
    def forward(self, step: StepInput, sampled: Tensor) -> tuple[Tensor, Tensor | None]:
        """Write the KV of all rows, after the steps before. `sampled`: tokens of the previous step, for pending rows.

        Returns logits [R, vocab] float32, valid until the next step, and hidden states [H, hidden] if any are wanted.
        """
        if step.new_pages:
            self.pool.memory.index_fill_(0, self._copier.upload(np.array(step.new_pages, dtype=np.int64)), 0)

        def fill_pending(ids: Tensor) -> None:
            if step.pending_tokens:
                rows, sources = self._copier.upload(np.array(step.pending_tokens).T)
                ids[rows] = sampled[sources]

        if self.graphs is not None and self.graphs.fits(step):
            logits = self.graphs.forward(step, fill_pending)
            self._run_head(step, self.graphs.token_ids)
            return logits, None
        rows = self._copier.upload(step.rows)
        fill_pending(rows[0])
        wanted = self._copier.upload(np.array(step.logit_rows + step.hidden_rows, dtype=np.int64))
        contexts = zip(group_heads(self._model.config), step.lens, step.tables, strict=True)
        batches = [
            PagedBatch(self.pool, heads, step.starts, lens, tables, step.decodes) for heads, lens, tables in contexts
        ]
        batch = TokenBatch(rows[0], rows[1], rows[2:], wanted)
        capture = self.head.capture(len(rows[0])) if self.head is not None else None
        hidden = self._model.hidden(batch, batches, capture)
        self._run_head(step, rows[0])
        num_sampled = len(step.logit_rows)
        return self._model.logits(hidden[:num_sampled]), hidden[num_sampled:] if step.hidden_rows else None

    def _run_head(self, step: StepInput, token_ids: Tensor) -> None:
        if self.head is not None and step.head is not None:
            self.head.run(step.head, token_ids)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits [n, vocab] float32 of hidden states that `forward` returned."""
        return self._model.logits(hidden)


def graph_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Return the numbers of rows that have graphs, in ascending order: dense where padding costs most."""
    largest = min(max_num_seqs, MAX_SIZE)
    steps = (1, 2, 4, 8, 16, 24, *range(32, 128, 16), *range(128, MAX_SIZE, 32))
    return (*(size for size in steps if size < largest), largest)


def num_scratch_blocks(config: EngineConfig) -> int:
    """Return the pages behind the pool that only padding and repeated tokens write to: a slot for every row."""
    padding = graph_sizes(config.max_num_seqs)[-1] if config.decode_graphs else 0
    repeated = config.max_num_seqs if config.has_draft_layer else 0
    return -(-max(padding, repeated) // config.block_tokens)


def static_bytes(config: EngineConfig, block_bytes: int) -> int:
    """Return the bytes of scratch pages, and of the block tables of graphs."""
    scratch = num_scratch_blocks(config) * block_bytes
    if not config.decode_graphs:
        return scratch
    widths = [aligned(each) for each in config.paging.table_widths(config.context_tokens)]
    tables = sum(widths) * graph_sizes(config.max_num_seqs)[-1] * torch.int32.itemsize
    return scratch + tables


class DecodeGraphs:
    """Decode steps as captured CUDA graphs: the model runs on fixed buffers, and a replay is one launch.

    A step is padded to the next of a few sizes. `pool` has the scratch pages behind its `config.num_blocks`. All sizes
    use the leading rows of the same buffers.

    A padding row is token 0 at position 0, with a scratch slot for its KV and one token of a scratch page for context.
    """

    def __init__(
        self,
        model: Decoder,
        pool: PagedPool,
        config: EngineConfig,
        copier: DeviceCopier,
        head: HeadExecutor | None = None,
    ) -> None:
        """`head`: the graphs also leave the features of all rows to it."""
        self.sizes = graph_sizes(config.max_num_seqs)
        self._model, self._pool, self._copier, self._head = model, pool, copier, head
        self._recorder = GraphRecorder(copier.device)
        self._replays: dict[int, Callable[[], None]] = {}
        largest, num_groups = self.sizes[-1], len(config.spans)
        at = np.arange(largest)
        slots = config.num_blocks * config.block_tokens + at
        self._padding = np.stack([0 * at, 0 * at, *[slots] * num_groups])
        self._pages: Tables = [(int(slot) // config.block_tokens,) for slot in slots]
        # The table now in each row of the buffers. Most rows keep the table of the step before.
        self._held: list[Tables] = [[()] * largest for _ in range(num_groups)]
        widths = [aligned(each) for each in config.paging.table_widths(config.context_tokens)]
        self._rows = copier.upload(self._padding).clone()
        self._starts = torch.arange(largest + 1, dtype=torch.int32, device=copier.device)
        self._lens = torch.ones(num_groups, aligned(largest), dtype=torch.int32, device=copier.device)
        self._tables = [torch.zeros(largest, width, dtype=torch.int32, device=copier.device) for width in widths]
        self._logit_rows = torch.arange(largest, device=copier.device)
        self._logits = torch.zeros(largest, model.config.vocab_size, device=copier.device)
        for group in range(num_groups):
            self._fill_tables(group, self._pages)

    @property
    def token_ids(self) -> Tensor:
        """Token ids of the last step's rows, and padding."""
        return self._rows[0]

    def fits(self, packed: StepInput) -> bool:
        """Return True if a graph can run this step."""
        return packed.is_decode and packed.rows.shape[1] <= self.sizes[-1]

    def forward(self, packed: StepInput, fill_in: Callable[[Tensor], None]) -> Tensor:
        """Return the logits, valid until the next step. `fill_in` writes pending tokens into the ids."""
        if not self._replays:
            # Capture the largest on padding alone: the graphs of smaller steps reuse its memory.
            self._record(self.sizes[-1])
        num_rows = packed.rows.shape[1]
        size = self.sizes[bisect_left(self.sizes, num_rows)]
        self._fill(packed, size)
        fill_in(self._rows[0])
        if size not in self._replays:
            self._record(size)
        self._replays[size]()
        return self._logits[:num_rows]

    def _record(self, size: int) -> None:
        self._replays[size] = self._recorder.capture(lambda: self._run(size))

    def _run(self, size: int) -> None:
        """Run the model on the buffers. No host code here may depend on their contents."""
        batches = []
        for heads, lens, tables in zip(group_heads(self._model.config), self._lens, self._tables, strict=True):
            tensors = PagedTensors(self._starts[: size + 1], lens[:size], tables[:size], max_rows=1)
            batches.append(resident_batch(self._pool, heads, tensors))
        rows = self._rows[:, :size]
        batch = TokenBatch(rows[0], rows[1], rows[2:], self._logit_rows[:size])
        capture = self._head.capture(size) if self._head is not None else None
        self._model.logits(self._model.hidden(batch, batches, capture), self._logits[:size])

    def _fill(self, packed: StepInput, size: int) -> None:
        num_rows = packed.rows.shape[1]
        rows = self._padding[:, :size].copy()
        rows[:, :num_rows] = packed.rows
        lens = np.ones((len(packed.lens), size), dtype=np.int32)
        lens[:, :num_rows] = packed.lens
        self._rows[:, :size] = self._copier.upload(rows)
        self._lens[:, :size] = self._copier.upload(lens)
        for group, tables in enumerate(packed.tables):
            self._fill_tables(group, tables + self._pages[num_rows:size])

    def _fill_tables(self, group: int, tables: Tables) -> None:
        held, buffer = self._held[group], self._tables[group]
        changed = [row for row, blocks in enumerate(tables) if blocks is not held[row]]
        if not changed:
            return
        # A table may continue with pages for later tokens.
        fitting = [tables[row][: buffer.shape[1]] for row in changed]
        filled = np.zeros((len(changed), max(map(len, fitting))), dtype=np.int32)
        for line, blocks in zip(filled, fitting, strict=True):
            line[: len(blocks)] = blocks
        target = buffer[:, : filled.shape[1]]
        target.index_copy_(0, self._copier.upload(np.array(changed)), self._copier.upload(filled))
        for row in changed:
            held[row] = tables[row]
