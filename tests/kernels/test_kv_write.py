"""Keys and values land in their slots of one layer, and nowhere else."""

from __future__ import annotations

import torch

from weft_kernels.kv_write import kv_write


def test_each_token_lands_in_its_slot_and_nothing_else_changes() -> None:
    pool = torch.zeros(5, 2, 3, 2, 4, 6)
    k, v = torch.randn(3, 2, 6), torch.randn(3, 2, 6)
    slots = torch.tensor([4 * 4 + 3, 0, 4 * 2 + 1])
    kv_write(k, v, pool, 1, slots)
    for token, (block, offset) in enumerate([(4, 3), (0, 0), (2, 1)]):
        assert torch.equal(pool[block, :, 1, 0, offset], k[token])
        assert torch.equal(pool[block, :, 1, 1, offset], v[token])
    assert pool.count_nonzero() == k.numel() + v.numel()
