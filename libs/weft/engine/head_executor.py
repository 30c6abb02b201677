"""Runs a draft model in the target's pages: fills its KV in every step, and drafts tokens before the next one."""

from __future__ import annotations

from collections.abc import Sequence as Items

import numpy as np
import torch
from torch import Tensor

from weft.engine.device_copier import Array, DeviceCopier
from weft.engine.head_planner import HeadRows, HeadStep
from weft.model.draft import DraftModel, DraftRows
from weft.model.step import Capture
from weft_kernels.layer_cache import PagedPool
from weft_kernels.paged_attention import PagedBatch
from weft_kernels.sampling import SamplingRows, sample, sample_drafts


class HeadExecutor:
    """One draft model on the target's device. `features` [places + rows of a step, boundaries, hidden]."""

    def __init__(
        self, head: DraftModel, pool: PagedPool, sizes: tuple[int, int], copier: DeviceCopier, hidden: int
    ) -> None:
        """`sizes`: places of features, and the most rows of a step. `hidden`: the target's hidden size."""
        self._head, self.pool, self.copier = head, pool, copier
        self.num_heads, self.hidden_size = head.config.num_heads, head.config.hidden_size
        self._num_places, max_rows = sizes
        shape = (self._num_places + max_rows, len(head.boundaries), hidden)
        # Graphs hold its address, so it never moves.
        self._features = torch.zeros(shape, dtype=pool.dtype, device=copier.device)

    def capture(self, num_rows: int) -> Capture:
        """Return where the target's step must leave the features of its rows."""
        return Capture(self._head.boundaries, self._features[self._num_places : self._num_places + num_rows])

    def run(self, step: HeadStep, token_ids: Tensor, places: Array | None = None) -> None:
        """Fill the slots of a step after its features were captured; `token_ids` [T]: of its rows.

        `places`: where `token_ids` and captured features have each row of the step; None: in its order.
        """
        if step.fill.token_ids:
            self.fill(step.fill, token_ids, places)
        if step.kept:
            kept = np.array(step.kept) if places is None else places[step.kept]
            sources = self.copier.upload(kept + self._num_places)
            self._features[self.copier.upload(np.array(step.places))] = self._features[sources]

    def fill(self, rows: HeadRows, step_ids: Tensor | None = None, places: Array | None = None) -> Tensor:
        """Write the KV of the rows; return the states behind the layer [T, hidden]. `places`: see `run`."""
        ids, features = self.copier.upload(np.array(rows.token_ids)), np.array(rows.features)
        if places is not None:
            is_of_step = features >= self._num_places
            features[is_of_step] = places[features[is_of_step] - self._num_places] + self._num_places
        if rows.pending:
            assert step_ids is not None
            pending, sources = np.array(rows.pending).T
            sources = sources if places is None else places[sources]
            ids[self.copier.upload(pending)] = step_ids[self.copier.upload(sources)]
        return self.forward(self.fuse(self.copier.upload(features)), ids, rows)

    def fuse(self, places: Tensor) -> Tensor:
        """Return the first states [T, hidden] of rows with the features at these places."""
        return self._head.fuse(self._features[places])

    def choose(self, state: Tensor, sampling: SamplingRows | None) -> tuple[Tensor, Tensor]:
        """Return a token of the target for each state, and its probability among the draft model's tokens."""
        logits, vocabulary = self._head.logits(state), self._head.vocabulary
        chosen = sample(logits, sampling) if vocabulary is None else sample_drafts(logits, sampling, vocabulary)
        columns = chosen if vocabulary is None else torch.searchsorted(vocabulary, chosen.int())
        picked = logits.gather(1, columns[:, None].long())[:, 0]
        return chosen, (picked - logits.logsumexp(-1)).exp()

    def zero(self, pages: Items[int]) -> None:
        """Clear pages that drafts begin: attention reads the rest of a page under a mask."""
        if pages:
            self.pool.memory.index_fill_(0, self.copier.upload(np.array(pages, dtype=np.int64)), 0)

    def forward(self, state: Tensor, token_ids: Tensor, rows: HeadRows) -> Tensor:
        """Write the KV of rows with these tokens and states; return the states behind the layer [T, hidden]."""
        batch = PagedBatch(self.pool, self.num_heads, rows.starts, rows.lens, rows.tables, rows.decodes, rows.first)
        positions, slots = (self.copier.upload(np.array(each)) for each in (rows.positions, rows.slots))
        return self.run_layer(state, (token_ids, positions, slots), batch)

    def run_layer(self, state: Tensor, rows: tuple[Tensor, Tensor, Tensor], batch: PagedBatch) -> Tensor:
        """Do the same with all of it on the device. `rows`: token ids, positions and slots."""
        token_ids, positions, slots = rows
        num_groups = self._head.place[0] + 1
        draft_rows = DraftRows(token_ids, positions, slots.expand(num_groups, -1))
        return self._head.forward(state, draft_rows, [batch] * num_groups)
