"""Runs the model on one device: KV pool, CUDA graphs and forward pass.

Takes only the numbers of a `StepInput`, so that every rank of a group can execute the same step.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from weft.engine.config import EngineConfig
from weft.engine.device_copy import DeviceCopier
from weft.engine.graphs import DecodeGraphs, num_scratch_blocks
from weft.engine.messages import PoolMemory
from weft.engine.step_input import StepInput
from weft.kv.memfd import create_shared_memory
from weft.model.decoder import Decoder
from weft.model.kv_layout import block_bytes, kv_groups
from weft.model.step import TokenBatch
from weft_kernels.paged_attention import PagedBatch

PAGE_BYTES = 4096
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class ModelExecutor:
    """One model on one device with its block pool. No method waits for the device."""

    def __init__(self, model: Decoder, config: EngineConfig, dtype: str, copier: DeviceCopier) -> None:
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
        num_heads, num_parts = model.config.num_kv_heads, model.config.kv_parts
        shape = num_blocks, num_heads, groups.size, num_parts, config.block_tokens, -1
        self.pool = memory[offset : offset + num_blocks * size].view(DTYPES[dtype]).view(shape)
        # Page-aligned and contiguous.
        self.pool_memory = PoolMemory(self.pool.data_ptr(), size, config.num_blocks, shared.fd if shared else None)
        self.graphs = DecodeGraphs(model, self.pool, config, copier) if config.decode_graphs else None

    @torch.inference_mode()
    def forward(self, step: StepInput, sampled: Tensor) -> tuple[Tensor, Tensor | None]:
        """Write the KV of all rows, after the steps before. `sampled`: tokens of the previous step, for pending rows.

        Returns logits [R, vocab] float32, valid until the next step, and hidden states [H, hidden] if any are wanted.
        """
        if step.new_pages:
            self.pool.index_fill_(0, self._copier.upload(np.array(step.new_pages, dtype=np.int64)), 0)

        def fill_pending(ids: Tensor) -> None:
            if step.pending_tokens:
                rows, sources = self._copier.upload(np.array(step.pending_tokens).T)
                ids[rows] = sampled[sources]

        if self.graphs is not None and self.graphs.fits(step):
            return self.graphs.forward(step, fill_pending), None
        rows = self._copier.upload(step.rows)
        fill_pending(rows[0])
        wanted = self._copier.upload(np.array(step.logit_rows + step.hidden_rows, dtype=np.int64))
        contexts = zip(step.lens, step.tables, strict=True)
        batches = [PagedBatch(self.pool, self._model.config.num_heads, step.starts, *each) for each in contexts]
        batch = TokenBatch(rows[0], rows[1], rows[2:], wanted)
        if not step.hidden_rows:
            return self._model.forward(batch, batches), None
        hidden = self._model.hidden(batch, batches)
        num_sampled = len(step.logit_rows)
        return self._model.logits(hidden[:num_sampled]), hidden[num_sampled:]

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits [n, vocab] float32 of hidden states that `forward` returned."""
        return self._model.logits(hidden)
