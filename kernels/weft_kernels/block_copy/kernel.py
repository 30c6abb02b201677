"""Copies pool blocks as runs of machine words; one program copies one piece of one block."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

PIECE_WORDS = 2048
WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


def gather_blocks_kernel(pool: Tensor, blocks: Tensor) -> Tensor:
    buffer = torch.empty(len(blocks), *pool.shape[1:], dtype=pool.dtype, device=pool.device)
    _launch(buffer, pool, blocks, True)
    return buffer


def scatter_blocks_kernel(buffer: Tensor, pool: Tensor, blocks: Tensor) -> None:
    _launch(buffer, pool, blocks, False)


def _launch(buffer: Tensor, pool: Tensor, blocks: Tensor, is_gather: bool) -> None:
    assert buffer.is_contiguous()
    assert buffer.shape == (len(blocks), *pool.shape[1:])
    assert buffer.dtype == pool.dtype
    assert buffer.device == pool.device == blocks.device
    assert blocks.dtype == torch.int64
    assert pool.numel() == 0 or pool[0].is_contiguous()
    num_bytes = math.prod(pool.shape[1:]) * pool.itemsize
    step = pool.stride(0) * pool.itemsize
    start = pool.storage_offset() * pool.itemsize
    size = math.gcd(8, num_bytes, step, start, buffer.data_ptr(), pool.data_ptr())
    if len(blocks) and num_bytes:
        grid = (len(blocks), triton.cdiv(num_bytes // size, PIECE_WORDS))
        _copy[grid](
            _words(buffer, size),
            _words(pool, size),
            blocks,
            num_bytes // size,
            step // size,
            GATHER=is_gather,
            BLOCK=PIECE_WORDS,
        )


def _words(tensor: Tensor, size: int) -> Tensor:
    """The same memory from the tensor's first item on, as words; the kernel counts from there."""
    storage = torch.empty(0, dtype=WORDS[size], device=tensor.device)
    offset = tensor.storage_offset() * tensor.itemsize // size
    return storage.set_(tensor.untyped_storage(), offset, (1,))  # type: ignore[call-overload, no-any-return]


@triton.jit
def _copy(
    p_buffer: tl.tensor,
    p_pool: tl.tensor,
    p_blocks: tl.tensor,
    num_words: tl.tensor,
    stride: tl.tensor,
    GATHER: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    i_block = tl.program_id(0).to(tl.int64)
    o_word = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m_word = o_word < num_words
    p_in_buffer = p_buffer + i_block * num_words + o_word
    p_in_pool = p_pool + tl.load(p_blocks + i_block) * stride + o_word
    # [BLOCK]
    if GATHER:
        tl.store(p_in_buffer, tl.load(p_in_pool, mask=m_word), mask=m_word)
    else:
        tl.store(p_in_pool, tl.load(p_in_buffer, mask=m_word), mask=m_word)
