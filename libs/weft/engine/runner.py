"""The part with tensors: owns the pool's bytes, turns a step's works into one packed batch, runs the model.

Knows neither which works are due nor what becomes of their tokens. Nothing here waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence as Items

import numpy as np
import torch

from weft.engine.batch import Work
from weft.engine.config import EngineConfig
from weft.engine.device import Array, Link
from weft.engine.messages import PoolMemory
from weft.engine.sampler import LaunchedStep, Sampler
from weft.kv.groups import PageRun
from weft.model.decoder import Decoder
from weft.model.kv_layout import block_bytes, kv_groups
from weft.model.step import Rows
from weft_kernels.paged_attention import PagedBatch

PAGE_BYTES = 4096
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class ModelRunner:
    """One model on one device with its block pool."""

    def __init__(self, model: Decoder, config: EngineConfig, dtype: str, device: torch.device) -> None:
        self._model = model
        self._block_tokens = config.block_tokens
        self._paging = config.paging
        groups = kv_groups(model.config)
        if groups.reaches != config.reaches:
            raise ValueError(f"the model's layers reach {groups.reaches}, the engine is for {config.reaches}")
        size = block_bytes(model.config, dtype, config.block_tokens)
        # Transfer engines register whole pages. Zeros: masked values are still multiplied, and 0 times NaN is NaN.
        memory = torch.zeros(config.num_blocks * size + PAGE_BYTES, dtype=torch.uint8, device=device)
        offset = -memory.data_ptr() % PAGE_BYTES
        shape = (
            config.num_blocks,
            model.config.num_kv_heads,
            groups.size,
            model.config.kv_parts,
            config.block_tokens,
            -1,
        )
        self.pool = memory[offset : offset + config.num_blocks * size].view(DTYPES[dtype]).view(shape)
        self._memory = PoolMemory(self.pool.data_ptr(), size, config.num_blocks)
        self._link = Link(device)
        self._sampler = Sampler(self._link, config)

    @property
    def pool_memory(self) -> PoolMemory:
        """Where the pool lies: page-aligned, one contiguous run."""
        return self._memory

    @torch.inference_mode()
    def launch(self, works: Items[Work]) -> LaunchedStep:
        """Begin to compute the KV of every work's tokens, after all steps launched before."""
        # Single tokens first, by length, as the attention groups neighbours; results go back in the order asked.
        order = sorted(range(len(works)), key=lambda i: (works[i].num_tokens > 1, -works[i].start))
        ordered = [works[i] for i in order]
        self._clear_new_tails(ordered)
        batches = [self._batch(ordered, group) for group in range(len(self._paging.reaches))]
        logits = self._model.forward(self._rows(ordered), batches)
        # row of the logits -> place among the works
        places = [i for i in order if works[i].samples]
        results = sorted(range(len(places)), key=places.__getitem__)
        return self._sampler.launch([works[i] for i in places], results, logits)

    def _rows(self, works: Items[Work]) -> Rows:
        token_ids: list[int] = []
        positions: list[Array] = []
        slots: list[list[Array]] = []
        logit_rows: list[int] = []
        unknown: list[tuple[int, int]] = []
        for work in works:
            sequence, start = work.sequence, work.start
            if start == len(sequence.token_ids):
                unknown.append((len(token_ids), self._sampler.last_row(sequence)))
                token_ids.append(0)
            else:
                token_ids += sequence.token_ids[start : start + work.num_tokens]
            at = np.arange(start, start + work.num_tokens)
            positions.append(at)
            slots.append([self._slots(run, at) for run in sequence.runs])
            if work.samples:
                logit_rows.append(len(token_ids) - 1)
        ids = self._link.upload(np.array(token_ids))
        if unknown:
            rows, sources = self._link.upload(np.array(unknown).T)
            ids[rows] = self._sampler.last[sources]
        return Rows(
            ids,
            self._link.upload(np.concatenate(positions)),
            self._link.upload(np.concatenate(slots, axis=1)),
            self._link.upload(np.array(logit_rows, dtype=np.int64)),
        )

    def _slots(self, run: PageRun, at: Array) -> Array:
        """Where the KV of these consecutive positions goes."""
        index = at // self._block_tokens
        blocks = np.array(run.blocks[index[0] - run.first : index[-1] + 1 - run.first])
        slots: Array = blocks[index - index[0]] * self._block_tokens + at % self._block_tokens
        return slots

    def _batch(self, works: Items[Work], group: int) -> PagedBatch:
        """Contexts begin at the group's first page, or a little before: attention knows distances and chunks alone."""
        starts = [0, *np.cumsum([work.num_tokens for work in works]).tolist()]
        lens, tables = [], []
        for work in works:
            run = work.sequence.runs[group]
            num_left_out = self._paging.num_left_out(group, run.first)
            lens.append(work.start + work.num_tokens - num_left_out * self._block_tokens)
            tables.append(run.blocks[:1] * (run.first - num_left_out) + run.blocks)
        return PagedBatch(self.pool, self._model.config.num_heads, starts, lens, tables)

    def _clear_new_tails(self, works: Items[Work]) -> None:
        """A block that this step begins and does not fill: its last owner's numbers must not be read under a mask."""
        begun: list[int | None] = []
        for work in works:
            index, num_filled = divmod(work.start + work.num_tokens, self._block_tokens)
            if num_filled and index * self._block_tokens >= work.start:
                begun += [run.page(index) for run in work.sequence.runs]
        if begun:
            self.pool.index_fill_(0, self._link.upload(np.array(begun, dtype=np.int64)), 0)
