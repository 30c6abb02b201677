"""Linear layers. Weights are packed once, at load, for the machine that runs them."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from weft_kernels.linear.packed12 import Packed12, pack_12
from weft_kernels.native import native
from weft_kernels.packed import Matrix

# Suffix of the native functions by the dtypes of activations and weights.
FORMS = {
    (torch.float32, torch.float32): "f32_f32",
    (torch.float32, torch.bfloat16): "f32_bf16",
    (torch.bfloat16, torch.bfloat16): "bf16_bf16",
}
PACKED12_FORMS = {torch.float32: "f32_packed12", torch.bfloat16: "bf16_packed12"}


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A weight [num_outputs, num_inputs] for activations of `dtype`.

    `data` is the matrix. With a `library` it is the panels of the matrix: bfloat16 unchanged or in 12 bits, else
    float32.
    """

    num_outputs: int
    num_inputs: int
    dtype: torch.dtype
    data: Matrix | Packed12
    library: ctypes.CDLL | None = None

    @property
    def num_bytes(self) -> int:
        return self.data.nbytes

    @property
    def form(self) -> str:
        """Suffix of the native functions that multiply this weight."""
        assert isinstance(self.data, Tensor | Packed12)
        return PACKED12_FORMS[self.dtype] if isinstance(self.data, Packed12) else FORMS[self.dtype, self.data.dtype]


def pack(weight: Matrix, dtype: torch.dtype, is_resident: bool = False) -> PackedWeight:
    """Prepare `weight` [outputs, inputs] for activations of `dtype` on the weight's device; a CPU copies it.

    A quantized weight that stays packed is used unchanged. With `is_resident` a CPU keeps bfloat16 in 12 bits if that
    saves memory; the results are the same to the last bit.

    bfloat16 weights stay bfloat16 on a CPU even for float32 activations. Widening them during the product is exact, and
    halves memory and read time.
    """
    if not isinstance(weight, Tensor):
        return PackedWeight(*weight.shape, dtype, weight)
    library = native() if weight.device.type == "cpu" and dtype in (torch.float32, torch.bfloat16) else None
    outputs, inputs = weight.shape
    if library is None or not weight.numel():
        return PackedWeight(outputs, inputs, dtype, weight.to(dtype).contiguous())
    is_half = torch.bfloat16 in (weight.dtype, dtype)
    plain = weight.to(torch.bfloat16 if is_half else torch.float32).contiguous()
    form, width = FORMS[dtype, plain.dtype], library.weft_panel()
    # bfloat16 lines come in pairs of inputs, or in larger groups for AMX; see linear/panels.h
    lines = {"f32_f32": inputs, "f32_bf16": inputs + inputs % 2, "bf16_bf16": library.weft_pair_lines(inputs)}[form]
    panels = plain.new_empty(-(-outputs // width), lines, width)
    function = getattr(library, f"weft_pack_{form}")
    function(plain.data_ptr(), outputs, inputs, panels.data_ptr(), torch.get_num_threads())
    can_pack = is_resident and is_half and hasattr(library, f"weft_linear_{PACKED12_FORMS[dtype]}")
    data = pack_12(library, panels) if can_pack else None
    return PackedWeight(outputs, inputs, dtype, panels if data is None else data, library)


def linear(x: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> Tensor:
    """out[..., o] = sum over i of x[..., i] * weight[o, i], plus bias[o]; summed in fp32, returned in x's dtype.

    x: [..., inputs], of the weight's `dtype`. The order of the sums differs from torch's. It depends neither on the
    number of threads nor on the other rows.
    """
    assert x.dtype == weight.dtype
    assert x.shape[-1] == weight.num_inputs
    if weight.library is None and isinstance(weight.data, Tensor):
        return linear_torch(x, weight.data, bias)
    if weight.library is None:
        from weft_kernels.packed.linear import linear_packed

        assert not isinstance(weight.data, Tensor | Packed12)
        return linear_packed(x, weight.data, bias)
    assert isinstance(weight.data, Tensor | Packed12)
    x = x.contiguous()
    out = x.new_empty(*x.shape[:-1], weight.num_outputs)
    num_rows = out.numel() // weight.num_outputs
    if not num_rows:
        return out
    sizes = num_rows, weight.num_inputs, weight.num_outputs, weight.data.data_ptr()
    added = None if bias is None else bias.to(x.dtype).contiguous()
    where = None if added is None else added.data_ptr()
    function = getattr(weight.library, f"weft_linear_{weight.form}")
    function(x.data_ptr(), *sizes, where, out.data_ptr(), torch.get_num_threads())
    return out


# For these numbers of fp32 rows torch's order took twice the time (Zen 3 and Zen 5, torch 2.13).
SWAPPED_ROWS = range(2, 65)


def linear_reference(x: Tensor, weight: Tensor) -> Tensor:
    """See `weft_kernels.linear.linear`; the sums are taken in fp32."""
    return (x.float() @ weight.float().T).to(x.dtype)


def linear_torch(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply with torch's fastest form for this number of rows. x: [..., inputs]."""
    if x.is_cuda or x.element_size() != 4 or x.numel() // x.shape[-1] not in SWAPPED_ROWS:
        return functional.linear(x, weight, bias)
    rows = x.reshape(-1, x.shape[-1])
    out = (weight @ rows.T).T if bias is None else (weight @ rows.T).T + bias
    return out.reshape(*x.shape[:-1], len(weight))
