"""Turns the tensors of a packed linear module into the form that kernels multiply, or into a plain matrix.

`READERS` has an entry for each packing; `weft.model.quantization` has the tensors' names and shapes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from weft.errors import BadCheckpoint
from weft.model.quantization import FP4_SCALES, NESTED_BLOCK, NF4_BLOCK, full_block
from weft.model.spec import Packing, Quantization
from weft_kernels.packed import Stored, read_fp8, read_int4

NIBBLES_OF_WORD = 8
# where AWQ puts the columns 0 to 7 into a word, in nibbles from the lowest
AWQ_NIBBLES = (0, 4, 1, 5, 2, 6, 3, 7)
# by the lower three bits of E2M1; the fourth is the sign
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


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

    def int4(self, part: str, words: Tensor, factors: Tensor, zeros: Tensor | None) -> Stored:
        """Return the rank's part of INT4 in words [rows, words], with factors and zero points [rows, groups]."""
        group = full_block(self.how, self.shape)[1]
        if zeros is not None:
            zeros = self.cut(part, zeros, (1, group))
        factors = self.cut(part, factors, (1, group))
        return read_int4(self.cut(part, words, (1, NIBBLES_OF_WORD)).contiguous(), factors, self.columns, group, zeros)

    def check_order(self, part: str, order: Tensor, num_groups: int) -> None:
        """Raise BadCheckpoint if columns name groups that do not exist."""
        if bool((order < 0).any() or (order >= num_groups).any()):
            raise self.error(part, f"expected groups below {num_groups}; download the file again")

    def error(self, part: str, what: str) -> BadCheckpoint:
        """Return the error to raise for a tensor."""
        return BadCheckpoint(f"tensor {self.name}.{part}: {what}")


def unpack_words(words: Tensor, bits: int) -> Tensor:
    """Return int32 [rows, words * 32 / bits]: values of a word lie side by side, the lowest bits first."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=words.device)
    return ((words[:, :, None] >> shifts) & (1 << bits) - 1).flatten(1)


def unpack_e2m1(pairs: Tensor) -> Tensor:
    """Return bfloat16 [..., 2 n] of bytes [..., n] with two weights each, the first in the lower half."""
    values = torch.tensor([*E2M1, *(-each for each in E2M1)], dtype=torch.bfloat16, device=pairs.device)
    # Both weights of a byte are looked up as one int32.
    of_byte = torch.stack((values.repeat(16), values.repeat_interleave(16)), 1).view(torch.int32).flatten()
    return of_byte.index_select(0, pairs.flatten().int()).view(pairs.shape).view(torch.bfloat16)


def unpack_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return bfloat16 [rows, groups * 32] of bytes [rows, groups, 16] and exponents [rows, groups]; all is exact."""
    factors = torch.exp2(scales.float() - 127).bfloat16()
    return (unpack_e2m1(blocks) * factors[..., None]).flatten(1)


def pack_words(values: Tensor) -> Tensor:
    """Return int32 [rows, words]: eight 4-bit values side by side in a word, the first in the lowest bits."""
    padded = functional.pad(values, (0, -values.shape[1] % NIBBLES_OF_WORD))
    words = torch.zeros(len(values), padded.shape[1] // NIBBLES_OF_WORD, dtype=torch.int32, device=values.device)
    for nibble in range(NIBBLES_OF_WORD):
        words |= padded[:, nibble::NIBBLES_OF_WORD] << 4 * nibble
    return words


def _fp8(module: PackedModule) -> Stored:
    how, shape = module.how, module.shape
    block = full_block(how, shape)
    factors = module.parts[how.scale].float()
    if how.packing is Packing.MXFP8:
        factors = torch.exp2(factors - 127)
    factors = factors.reshape(-(-shape[0] // block[0]), -(-shape[1] // block[1]))
    patterns = module.cut("weight", module.parts["weight"], (1, 1))
    return read_fp8(patterns, module.cut(how.scale, factors, block), block)


def _int4(module: PackedModule) -> Stored:
    how, parts, (rows, columns) = module.how, module.parts, module.shape
    block = full_block(how, module.shape)
    if tuple(parts["weight_shape"].tolist()) != module.shape:
        found = list(parts["weight_packed"].shape)
        raise module.error("weight_packed", f"{found} does not hold {parts['weight_shape'].tolist()}")
    zeros = None
    if not how.is_symmetric:
        zeros = unpack_words(parts["weight_zero_point"].t(), how.bits).t()[:rows]
    if not how.is_expanded:
        return module.int4("weight_packed", parts["weight_packed"], parts["weight_scale"], zeros)
    values = unpack_words(parts["weight_packed"], how.bits)[:, :columns]
    order = parts["weight_g_idx"].long() if how.is_ordered else torch.arange(columns, device=values.device) // block[1]
    module.check_order("weight_g_idx", order, parts["weight_scale"].shape[1])
    values = values - ((1 << how.bits - 1) if zeros is None else zeros[:, order])
    return module.whole(values * parts["weight_scale"].float()[:, order])


def _int8(module: PackedModule) -> Stored:
    zeros = 0.0 if module.how.is_symmetric else _spread(module, "weight_zero_point")
    return module.whole((module.parts["weight"].float() - zeros) * _spread(module, "weight_scale"))


def _spread(module: PackedModule, part: str) -> Tensor:
    """Return the factor of each weight, float32."""
    (rows, columns), block = module.shape, full_block(module.how, module.shape)
    factors = module.parts[part].float().reshape(-(-rows // block[0]), -(-columns // block[1]))
    return factors.repeat_interleave(block[0], 0)[:rows].repeat_interleave(block[1], 1)[:, :columns]


def _unpack_awq(words: Tensor) -> Tensor:
    return unpack_words(words, 4).view(len(words), -1, 8)[:, :, AWQ_NIBBLES].flatten(1)


def _awq(module: PackedModule) -> Stored:
    """Words run along the outputs of the transposed matrix; make such along the inputs of them."""
    values, zeros = (_unpack_awq(module.parts[part])[:, : module.shape[0]].t() for part in ("qweight", "qzeros"))
    return module.int4("qweight", pack_words(values), module.parts["scales"].t(), zeros)


def _fp4(module: PackedModule) -> Stored:
    name, _, whole = FP4_SCALES[module.how.packing]
    values = unpack_e2m1(module.parts[name]).float()
    scales = module.parts["weight_scale"]
    if module.how.packing in (Packing.MXFP4, Packing.MXFP4_QUARK):
        factors = torch.exp2(scales.float() - 127)
    else:
        own = module.parts[whole].float()
        factors = scales.float() / own if module.how.packing is Packing.NVFP4 else scales.float() * own
    return module.whole(values * factors.repeat_interleave(module.how.block[1], 1)[:, : module.shape[1]])


def _gptq(module: PackedModule) -> Stored:
    how, parts, (rows, columns) = module.how, module.parts, module.shape
    group, middle = full_block(how, module.shape)[1], 1 << how.bits - 1
    zeros = unpack_words(parts["qzeros"], how.bits)[:, :rows] + how.zero_offset & (1 << how.bits) - 1
    order = parts["g_idx"].long()
    if how.is_symmetric and bool((zeros != middle).any()):
        raise module.error("qzeros", f"holds other values than {middle}; set sym to false in config.json")
    if not how.is_ordered and not torch.equal(order, torch.arange(columns, device=order.device) // group):
        raise module.error("g_idx", "columns are not in the order of groups; set desc_act to true in config.json")
    module.check_order("g_idx", order, len(zeros))
    if not how.is_expanded:
        return module.int4(
            "qweight", parts["qweight"].t(), parts["scales"].t(), None if how.is_symmetric else zeros.t()
        )
    values = unpack_words(parts["qweight"].t(), how.bits)[:, :columns] - zeros.t()[:, order]
    return module.whole(values * parts["scales"].float().t()[:, order])


def _bitsandbytes(module: PackedModule) -> Stored:
    """Look codes up, the first weight in a byte's upper half, and multiply them with the factors of the flat matrix."""
    parts, (rows, columns) = module.parts, module.shape
    factors, offset = parts["weight.absmax"], _nested_offset(module)
    if module.how.is_nested:
        of_blocks = parts["weight.nested_absmax"].float().repeat_interleave(NESTED_BLOCK)[: len(factors)]
        factors = parts["weight.nested_quant_map"].float()[factors.long()] * of_blocks + offset
    patterns = parts["weight"].flatten()
    codes = torch.stack((patterns >> 4, patterns & 15), 1).flatten()[: rows * columns]
    values = parts["weight.quant_map"].float()[codes.long()]
    values *= factors.float().repeat_interleave(NF4_BLOCK)[: len(values)]
    return module.whole(values.view(rows, columns))


def _nested_offset(module: PackedModule) -> float:
    """Return what is added to the factors, after checking the library's description of the weight, which is JSON."""
    what = "expected JSON of bitsandbytes for this weight; download the file again"
    try:
        said = json.loads(bytes(module.parts[module.how.scale].tolist()))
        found = tuple(said["shape"]), said["blocksize"], said.get("nested_blocksize", NESTED_BLOCK)
        offset = float(said.get("nested_offset", 0.0))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise module.error(module.how.scale, f"{what}: {error}") from error
    if found != (module.shape, NF4_BLOCK, NESTED_BLOCK) or not math.isfinite(offset):
        raise module.error(module.how.scale, f"{what}: found shape and blocks {found}, offset {offset}")
    return offset


READERS: dict[Packing, Callable[[PackedModule], Stored]] = {
    Packing.FP8_BLOCKS: _fp8,
    Packing.MXFP8: _fp8,
    Packing.INT4_GROUPS: _int4,
    Packing.GPTQ: _gptq,
    Packing.AWQ: _awq,
    Packing.INT8: _int8,
    Packing.NVFP4: _fp4,
    Packing.NVFP4_MODELOPT: _fp4,
    Packing.MXFP4: _fp4,
    Packing.MXFP4_QUARK: _fp4,
    Packing.BITSANDBYTES: _bitsandbytes,
}
