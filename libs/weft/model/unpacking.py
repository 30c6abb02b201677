"""Turns the tensors of a packed linear module into the form that kernels multiply, or into a plain matrix.

`READERS` has an entry for each packing; `weft.model.quantization` has the tensors' names and shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from weft.errors import BadCheckpoint
from weft.model.quantization import full_block
from weft.model.spec import Packing, Quantization
from weft_kernels.packed import Stored, read_fp8, read_int4

NIBBLES_OF_WORD = 8


@dataclass(frozen=True, slots=True)
class PackedModule:
    """A packed linear module [outputs, inputs]; `parts` are whole tensors, by the last part of their names.

    `cut` returns a rank's part, on its device, of a named tensor with one element for each block (rows, columns).
    `columns` are those of the rank's part. Plain matrices take `dtype`.
    """

    name: str
    how: Quantization
    shape: tuple[int, int]
    columns: int
    parts: Mapping[str, Tensor]
    cut: Callable[[str, Tensor, tuple[int, int]], Tensor]
    dtype: torch.dtype

    def read(self) -> Stored:
        """Return the rank's part of the weight. Raises BadCheckpoint."""
        return READERS[self.how.packing](self)

    def whole(self, matrix: Tensor) -> Tensor:
        """Return the rank's part of an unpacked matrix, which can be cut anywhere."""
        return self.cut("weight", matrix.to(self.dtype), (1, 1))

    def error(self, part: str, what: str) -> BadCheckpoint:
        """Return the error to raise for a tensor."""
        return BadCheckpoint(f"tensor {self.name}.{part}: {what}")


def unpack_words(words: Tensor, bits: int) -> Tensor:
    """Return int32 [rows, words * 32 / bits]: values of a word lie side by side, the lowest bits first."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=words.device)
    return ((words[:, :, None] >> shifts) & (1 << bits) - 1).flatten(1)


def _fp8(module: PackedModule) -> Stored:
    how, shape = module.how, module.shape
    block = full_block(how, shape)
    factors = module.parts[how.scale].float().reshape(-(-shape[0] // block[0]), -(-shape[1] // block[1]))
    patterns = module.cut("weight", module.parts["weight"], (1, 1))
    return read_fp8(patterns, module.cut(how.scale, factors, block), block)


def _int4(module: PackedModule) -> Stored:
    parts, block = module.parts, full_block(module.how, module.shape)
    if tuple(parts["weight_shape"].tolist()) != module.shape:
        found = list(parts["weight_packed"].shape)
        raise module.error("weight_packed", f"{found} does not hold {parts['weight_shape'].tolist()}")
    words = module.cut("weight_packed", parts["weight_packed"], (1, NIBBLES_OF_WORD))
    return read_int4(words, module.cut("weight_scale", parts["weight_scale"], block), module.columns, block[1])


def _gptq(module: PackedModule) -> Stored:
    how, parts, (rows, columns) = module.how, module.parts, module.shape
    group, middle = full_block(how, module.shape)[1], 1 << how.bits - 1
    zeros = unpack_words(parts["qzeros"], how.bits)[:, :rows] + how.zero_offset & (1 << how.bits) - 1
    order = parts["g_idx"].long()
    if how.is_symmetric and bool((zeros != middle).any()):
        raise module.error("qzeros", f"holds other values than {middle}; set sym to false in config.json")
    if not how.is_ordered and not torch.equal(order, torch.arange(columns, device=order.device) // group):
        raise module.error("g_idx", "columns are not in the order of groups; set desc_act to true in config.json")
    if bool((order < 0).any() or (order >= len(zeros)).any()):
        raise module.error("g_idx", f"expected groups below {len(zeros)}; download the file again")
    if not how.is_expanded:
        words = module.cut("qweight", parts["qweight"].t(), (1, NIBBLES_OF_WORD)).contiguous()
        return read_int4(words, module.cut("scales", parts["scales"].t(), (1, group)), module.columns, group)
    values = unpack_words(parts["qweight"].t(), how.bits)[:, :columns] - zeros.t()[:, order]
    return module.whole(values * parts["scales"].float().t()[:, order])


READERS: dict[Packing, Callable[[PackedModule], Stored]] = {
    Packing.FP8_BLOCKS: _fp8,
    Packing.INT4_GROUPS: _int4,
    Packing.GPTQ: _gptq,
}
