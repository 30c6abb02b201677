"""The part with tensors: owns the pool's bytes, runs the model on a step's works, packed in one batch.

Knows neither which works are due nor what becomes of their tokens. Nothing here waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence as Items

import numpy as np
import torch
from torch import Tensor

from weft.engine.config import EngineConfig
from weft.engine.device_copy import DeviceCopier
from weft.engine.graphs import DecodeGraphs, num_scratch_blocks
from weft.engine.messages import PoolMemory
from weft.engine.sampler import LaunchedStep, Sampler
from weft.engine.step_input import StepInput, StepInputBuilder
from weft.engine.step_scheduler import ScheduledChunk
from weft.kv.memfd import create_shared_memory
from weft.model.decoder import Decoder
from weft.model.kv_layout import block_bytes, kv_groups
from weft.model.step import TokenBatch
from weft_kernels.paged_attention import PagedBatch

PAGE_BYTES = 4096
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class ModelRunner:
    """One model on one device with its block pool."""

    def __init__(self, model: Decoder, config: EngineConfig, dtype: str, device: torch.device) -> None:
        self._model = model
        self._block_tokens = config.block_tokens
        groups = kv_groups(model.config)
        if groups.spans != config.spans:
            raise ValueError(f"the model's layers reach {groups.spans}, the engine is for {config.spans}")
        size = block_bytes(model.config, dtype, config.block_tokens)
        # Transfer engines register whole pages. Zeros: masked values are still multiplied, and 0 times NaN is NaN.
        num_blocks = config.num_blocks + num_scratch_blocks(config)
        num_bytes = num_blocks * size + PAGE_BYTES
        shared = create_shared_memory(num_bytes, "weft-kv-pool") if device.type == "cpu" else None
        if shared is None:
            memory = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        else:
            memory = torch.frombuffer(shared.mapping, dtype=torch.uint8)
        offset = -memory.data_ptr() % PAGE_BYTES
        num_heads, num_parts = model.config.num_kv_heads, model.config.kv_parts
        shape = num_blocks, num_heads, groups.size, num_parts, config.block_tokens, -1
        self.pool = memory[offset : offset + num_blocks * size].view(DTYPES[dtype]).view(shape)
        self._memory = PoolMemory(self.pool.data_ptr(), size, config.num_blocks, shared.fd if shared else None)
        self._link = DeviceCopier(device)
        self._sampler = Sampler(self._link, config)
        self._packer = StepInputBuilder(config.paging, self._sampler.last_row)
        self._graphs = DecodeGraphs(model, self.pool, config, self._link) if config.decode_graphs else None

    @property
    def pool_memory(self) -> PoolMemory:
        """Where the pool lies: page-aligned, one contiguous run."""
        return self._memory

    @torch.inference_mode()
    def launch(self, chunks: Items[ScheduledChunk]) -> LaunchedStep:
        """Begin to compute the KV of every work's tokens, after all steps launched before."""
        # Single tokens first, by length, as the attention groups neighbours; results go back in the order asked.
        order = sorted(range(len(chunks)), key=lambda i: (chunks[i].num_tokens > 1, -chunks[i].start))
        ordered = [chunks[i] for i in order]
        self._clear_new_tails(ordered)
        logits = self._forward(self._packer.build(ordered), ordered)
        # row of the logits -> place among the works
        places = [i for i in order if chunks[i].has_sample]
        results = sorted(range(len(places)), key=places.__getitem__)
        return self._sampler.launch([chunks[i] for i in places], results, logits)

    def _forward(self, packed: StepInput, chunks: Items[ScheduledChunk]) -> Tensor:
        """Logits of those who sample, until the next step."""

        def fill_in(ids: Tensor) -> None:
            if packed.pending_tokens:
                rows, sources = self._link.upload(np.array(packed.pending_tokens).T)
                ids[rows] = self._sampler.last[sources]

        if self._graphs is not None and self._graphs.fits(packed):
            return self._graphs.forward(packed, fill_in)
        rows = self._link.upload(packed.rows)
        fill_in(rows[0])
        wanted = self._link.upload(np.array(packed.logit_rows + packed.hidden_rows, dtype=np.int64))
        contexts = zip(packed.lens, packed.tables, strict=True)
        batches = [PagedBatch(self.pool, self._model.config.num_heads, packed.starts, *each) for each in contexts]
        batch = TokenBatch(rows[0], rows[1], rows[2:], wanted)
        if not packed.hidden_rows:
            return self._model.forward(batch, batches)
        hidden = self._model.hidden(batch, batches)
        num_sampling = len(packed.logit_rows)
        self._show([chunk for chunk in chunks if chunk.has_observer], hidden[num_sampling:])
        return self._model.logits(hidden[:num_sampling])

    def _show(self, chunks: Items[ScheduledChunk], hidden: Tensor) -> None:
        """Hidden states of all rows of these works to their readers."""
        for chunk, rows in zip(chunks, torch.split(hidden, [chunk.num_tokens for chunk in chunks]), strict=True):
            if (reader := chunk.sequence.spec.observer) is not None:
                reader.observe(chunk.start, rows, self._model.logits)

    def _clear_new_tails(self, chunks: Items[ScheduledChunk]) -> None:
        """A block that this step begins and does not fill: its last owner's numbers must not be read under a mask."""
        begun: list[int | None] = []
        for chunk in chunks:
            index, num_filled = divmod(chunk.start + chunk.num_tokens, self._block_tokens)
            if num_filled and index * self._block_tokens >= chunk.start:
                begun += [run.page(index) for run in chunk.sequence.page_ranges]
        if begun:
            self.pool.index_fill_(0, self._link.upload(np.array(begun, dtype=np.int64)), 0)
