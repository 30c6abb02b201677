"""Runs the model on one device: KV pool, CUDA graphs, copies and forward pass.

Takes only the numbers of a `StepInput`, so that every rank of a group can execute the same step.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from weft.engine.config import EngineConfig
from weft.engine.device_copier import Array, DeviceCopier
from weft.engine.graph_shapes import GraphShapes, num_scratch_blocks
from weft.engine.graphs import DecodeGraphs
from weft.engine.head_executor import HeadExecutor
from weft.engine.head_graphs import HeadGraphs
from weft.engine.head_planner import max_step_rows, num_feature_places
from weft.engine.messages import PoolMemory
from weft.engine.step_input import StepInput
from weft.kv.memfd import create_shared_memory
from weft.model.decoder import Decoder
from weft.model.draft import DraftModel
from weft.model.kv_layout import block_bytes, draft_group, group_heads, kv_groups, units
from weft.model.paged_pool import paged_pool
from weft.model.step import TokenBatch
from weft_kernels.paged_attention import PagedBatch

PAGE_BYTES = 4096
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class ModelExecutor:
    """One model on one device with its block pool. No method waits for the device."""

    def __init__(
        self,
        model: Decoder,
        config: EngineConfig,
        dtype: str,
        copier: DeviceCopier,
        head: DraftModel | None = None,
        *,
        pool_fd: int | None = None,
    ) -> None:
        """`head`: a draft model with its layer in the model's pages. `pool_fd`: memory of a pool that another rank has
        created; it is closed.
        """
        whole = model.whole_config
        if config.draft_group != draft_group(whole) or config.has_draft_layer != (head is not None):
            raise ValueError("drafts: model, engine and draft model must agree on whether there is a draft layer")
        groups = kv_groups(whole)
        if groups.spans != config.spans:
            raise ValueError(f"spans: the model has {groups.spans}, but the engine has {config.spans}")
        self._model = model
        self._copier = copier
        size = block_bytes(whole, dtype, config.block_tokens)
        num_blocks = config.num_blocks + num_scratch_blocks(config)
        # Transfer engines register whole pages of memory, so the pool starts at a page boundary. It starts as zeros:
        # attention multiplies masked values too, and 0 times NaN is NaN.
        num_bytes = num_blocks * size + PAGE_BYTES
        memory, fd = _pool_bytes(num_bytes, copier.device, pool_fd)
        offset = -memory.data_ptr() % PAGE_BYTES
        pages = memory[offset : offset + num_blocks * size].view(DTYPES[dtype]).view(num_blocks, -1)
        self.pool = paged_pool(whole, pages, config.block_tokens, model.shard)
        # Page-aligned and contiguous.
        self.pool_memory = PoolMemory(
            address=pages.data_ptr(),
            block_bytes=size,
            num_blocks=config.num_blocks,
            shared_fd=fd,
            units=tuple(units(whole, group, dtype, config.block_tokens) for group in range(len(groups.groups))),
        )
        self.head = None
        if head is not None:
            largest = GraphShapes(config).largest.total_rows if config.decode_graphs else 0
            sizes = num_feature_places(config), max(max_step_rows(config), largest)
            self.head = HeadExecutor(head, self.pool, sizes, copier, model.config.hidden_size)
        self.graphs = DecodeGraphs(model, self.pool, config, copier, self.head) if config.decode_graphs else None
        self.head_graphs: HeadGraphs | None = None
        if self.graphs is not None and self.head is not None and config.has_draft_graphs:
            self.head_graphs = HeadGraphs(self.head, config, self.graphs.recorder)

    @torch.inference_mode()
    def clear_pages(self, pages: Sequence[int]) -> None:
        """Fill pages with zeros."""
        if pages:
            self.pool.memory.index_fill_(0, self._copier.upload(np.array(pages, dtype=np.int64)), 0)

    @torch.inference_mode()
    def forward(self, step: StepInput, sampled: Tensor) -> tuple[Tensor, Tensor | None]:
        """Write the KV of all rows, after the steps before. `sampled`: tokens of the previous step, for pending rows.

        Returns logits [R, vocab] float32, valid until the next step, and hidden states [H, hidden] if any are wanted.
        """
        self.clear_pages(step.new_pages)
        if self.graphs is not None and (shape := self.graphs.shape_of(step)) is not None:
            if not self.graphs.has_captured:
                self._capture_largest(self.graphs)
            logits, places = self.graphs.forward(step, shape, sampled)
            self._run_head(step, self.graphs.token_ids, places)
            return logits, None
        rows = self._copier.upload(step.rows)
        if step.pending_tokens:
            pending, sources = self._copier.upload(np.array(step.pending_tokens).T)
            rows[0][pending] = sampled[sources]
        wanted = self._copier.upload(np.array(step.logit_rows + step.hidden_rows, dtype=np.int64))
        contexts = zip(group_heads(self._model.config), step.lens, step.tables, strict=True)
        batches = [
            PagedBatch(self.pool, heads, step.starts, lens, tables, step.decodes) for heads, lens, tables in contexts
        ]
        batch = TokenBatch(rows[0], rows[1], rows[2:], wanted)
        needs_features = self.head is not None and step.head is not None and not step.head.is_empty
        capture = self.head.capture(len(rows[0])) if self.head is not None and needs_features else None
        hidden = self._model.hidden(batch, batches, capture)
        self._run_head(step, rows[0])
        num_sampled = len(step.logit_rows)
        return self._model.logits(hidden[:num_sampled]), hidden[num_sampled:] if step.hidden_rows else None

    def _capture_largest(self, graphs: DecodeGraphs) -> None:
        graphs.capture_largest()
        if self.head_graphs is not None:
            self.head_graphs.capture_largest()

    def _run_head(self, step: StepInput, token_ids: Tensor, places: Array | None = None) -> None:
        if self.head is not None and step.head is not None:
            self.head.run(step.head, token_ids, places)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits [n, vocab] float32 of hidden states that `forward` returned."""
        return self._model.logits(hidden)


def _pool_bytes(num_bytes: int, device: torch.device, fd: int | None) -> tuple[Tensor, int | None]:
    """Return memory that is zero at first, and on a CPU the file of it, if there is one. `fd`: see `ModelExecutor`."""
    if fd is not None:
        mapping = mmap.mmap(fd, num_bytes)
        os.close(fd)
        return torch.frombuffer(mapping, dtype=torch.uint8), None
    shared = create_shared_memory(num_bytes, "weft-kv-pool") if device.type == "cpu" else None
    if shared is None:
        return torch.zeros(num_bytes, dtype=torch.uint8, device=device), None
    return torch.frombuffer(shared.mapping, dtype=torch.uint8), shared.fd
