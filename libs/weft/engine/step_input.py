"""One step as numbers, as every rank of a group can execute it. No tensors."""

from __future__ import annotations

from dataclasses import dataclass

from weft.engine.device_copier import Array
from weft.engine.head_planner import HeadStep
from weft.engine.page_slots import Tables


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
