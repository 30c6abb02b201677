"""Rows of a sequence that decodes give the same bits together as in steps of one row, in every kind of layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import pytest
import torch
from torch import Tensor

from tests.kernels.device import ISAS
from tests.weft.tiny_families import TinyFamily
from weft.model.decoder import Decoder
from weft.model.kv_layout import block_bytes, group_heads, kv_groups
from weft.model.paged_pool import paged_pool
from weft.model.step import TokenBatch
from weft_kernels.native import CHOICE
from weft_kernels.paged_attention import PagedBatch

pytestmark = pytest.mark.skipif(not ISAS, reason="no build for this processor")
BLOCK_TOKENS = 4
# New rows and context of each sequence: block ends within the rows, windows of 8 and 9, attention chunks of 8.
SEQUENCES = [(16, 40), (1, 9), (5, 5), (7, 24), (1, 30), (2, 17)]


class Steps:
    """Steps of a model with pages for each sequence and group of layers; keys before the new rows are random."""

    def __init__(self, model: Decoder) -> None:
        config, groups = model.config, kv_groups(model.config)
        generator = torch.Generator().manual_seed(3)
        self._model, self._heads = model, group_heads(config)
        num_blocks = [-(-context // BLOCK_TOKENS) for _, context in SEQUENCES]
        pages = torch.randperm(sum(num_blocks) * len(groups.spans), generator=generator)
        self._tables = [torch.split(own, num_blocks) for own in pages.chunk(len(groups.spans))]
        shape = len(pages), block_bytes(config, "float32", BLOCK_TOKENS) // 4
        self.pool = torch.randn(shape, generator=generator).to(model.dtype)
        self._ids = [torch.randint(config.vocab_size, (rows,), generator=generator) for rows, _ in SEQUENCES]

    def run(self, pool: Tensor, some: Sequence[tuple[int, int, int]]) -> tuple[Tensor, ...]:
        """Run new rows first .. end of sequences (index, first, end); return the logits of each sequence."""
        counts = [end - first for _, first, end in some]
        starts = list(accumulate(counts, initial=0))
        before = [SEQUENCES[index][1] - SEQUENCES[index][0] for index, _, _ in some]
        at = [torch.arange(old + first, old + end) for old, (_, first, end) in zip(before, some, strict=True)]
        lens = [old + end for old, (_, _, end) in zip(before, some, strict=True)]
        batches, slots, caches = [], [], paged_pool(self._model.config, pool, BLOCK_TOKENS)
        for heads, table in zip(self._heads, self._tables, strict=True):
            own = [table[index] for index, _, _ in some]
            places = [
                each[rows // BLOCK_TOKENS] * BLOCK_TOKENS + rows % BLOCK_TOKENS
                for each, rows in zip(own, at, strict=True)
            ]
            slots.append(torch.cat(places))
            tables = [each.tolist() for each in own]
            batches.append(PagedBatch(caches, heads, starts, lens, tables, [True] * len(some)))
        ids = torch.cat([self._ids[index][first:end] for index, first, end in some])
        rows = TokenBatch(ids, torch.cat(at), torch.stack(slots), torch.arange(starts[-1]))
        with torch.inference_mode():
            return torch.split(self._model.forward(rows, batches), counts)


# One family for each kind of layer.
NAMES = [
    *("llama3", "mistral-window", "qwen3", "gemma3-alike", "olmo3", "starcoder2", "phi3-longrope"),
    *("llama4-dense", "qwen2-moe", "minimax-m2", "gpt-oss", "deepseek", "mistral4", "laguna", "trinity"),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", NAMES)
def test_decoding_rows_equal_steps_of_one_row(
    name: str, dtype: torch.dtype, family_of: Callable[[str], TinyFamily], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CHOICE, ISAS[-1])
    tiny = family_of(name)
    steps = Steps(Decoder(tiny.config, tiny.weights, dtype, torch.device("cpu")))
    together, alone = steps.pool.clone(), steps.pool.clone()
    found = steps.run(together, [(index, 0, rows) for index, (rows, _) in enumerate(SEQUENCES)])
    for index, (rows, _) in enumerate(SEQUENCES):
        one_by_one = [steps.run(alone, [(index, row, row + 1)])[0] for row in range(rows)]
        assert torch.equal(found[index], torch.cat(one_by_one))
    assert torch.equal(together, alone)
    assert not torch.equal(together, steps.pool), "no keys were written"
