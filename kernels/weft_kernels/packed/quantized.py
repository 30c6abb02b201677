"""What packed weights of quantized checkpoints stand for: block-scaled FP8, and INT4 with a factor for every group."""

from __future__ import annotations

import torch
from torch import Tensor


def unpack_fp8(packed: Tensor, scale: Tensor, block: tuple[int, int]) -> Tensor:
    """float32: every `block` of rows and columns times its own factor; the last blocks may be cut."""
    rows = scale.repeat_interleave(block[0], 0)[: packed.shape[0]]
    return packed.float() * rows.repeat_interleave(block[1], 1)[:, : packed.shape[1]]


def unpack_int4(packed: Tensor, scale: Tensor, columns: int) -> Tensor:
    """float32 [rows, columns]: eight values to a word, the first in the lowest bits, 8 for 0; a factor a group."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=packed.device)
    values = ((packed[:, :, None] >> shifts) & 15).flatten(1)[:, :columns] - 8
    group = -(-columns // scale.shape[1])
    return values.float() * scale.repeat_interleave(group, 1)[:, :columns]
