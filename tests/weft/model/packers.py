"""Writers of quantized formats, after the documents of their tools; each also returns what its tensors stand for.

`FORMATS` has the `quantization_config` of each.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch

Tensors = dict[str, torch.Tensor]
GROUP = 16


def compressed(kind: str, weights: dict[str, Any], activations: dict[str, Any] | None = None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"symmetric": True, **weights}, "input_activations": activations}
    fields = {"quant_method": "compressed-tensors", "format": kind, "config_groups": {"group_0": group}}
    return {**fields, "ignore": ["lm_head", "model.layers.0.mlp.down_proj"], "quantization_status": "compressed"}


def floats(strategy: str, **more: Any) -> dict[str, Any]:
    activations = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
    return compressed("float-quantized", {"num_bits": 8, "type": "float", "strategy": strategy, **more}, activations)


def gptq(**more: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": True, "desc_act": False, **more}


def ints(kind: str, num_bits: int, strategy: str, **more: Any) -> dict[str, Any]:
    group = {"group_size": GROUP} if strategy == "group" else {}
    return compressed(kind, {"num_bits": num_bits, "type": "int", "strategy": strategy, **group, **more})


def fp4(kind: str, strategy: str, group_size: int) -> dict[str, Any]:
    return compressed(kind, {"num_bits": 4, "type": "float", "strategy": strategy, "group_size": group_size})


def bitsandbytes(kind: str, is_nested: bool) -> dict[str, Any]:
    fields = {"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False}
    fields |= {"bnb_4bit_quant_type": kind, "bnb_4bit_use_double_quant": is_nested}
    return fields | {"llm_int8_skip_modules": ["lm_head", "model.layers.1.self_attn"]}


def modelopt(algorithm: str, **more: Any) -> dict[str, Any]:
    ignore = ["lm_head", "model.layers.1.self_attn*"]
    return {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": ignore, **more}


def quark(dtype: str, scheme: str, **more: Any) -> dict[str, Any]:
    weight = {"dtype": dtype, "qscheme": scheme, "is_dynamic": False, "symmetric": True, **more}
    fields = {"quant_method": "quark", "global_quant_config": {"weight": weight, "input_tensors": None}}
    return {**fields, "exclude": ["lm_head", "re:.*layers[.]1[.]mlp.*"], "export": {"pack_method": "reorder"}}


FP8_TENSOR = {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head", "layers.1.mlp"]}
FORMATS: dict[str, dict[str, Any]] = {
    "fp8-channel": floats("channel"),
    "fp8-tensor": floats("tensor"),
    "fp8-block": floats("block", block_structure=[16, 8]),
    "fp8-auto": FP8_TENSOR,
    "fp8-transformers": {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None},
    "gptq": gptq(),
    "gptq-order": gptq(desc_act=True),
    "gptq-asymmetric": gptq(sym=False),
    "gptq-v2": gptq(sym=False, desc_act=True, checkpoint_format="gptq_v2"),
    "gptq-channel": gptq(group_size=-1),
    "awq": {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"},
    "int4-channel": ints("pack-quantized", 4, "channel"),
    "int4-asymmetric": ints("pack-quantized", 4, "group", symmetric=False),
    "int4-asymmetric-channel": ints("pack-quantized", 4, "channel", symmetric=False),
    "int4-order": ints("pack-quantized", 4, "group", actorder="group"),
    "int4-asymmetric-order": ints("pack-quantized", 4, "group", actorder="group", symmetric=False),
    "int8-words": ints("pack-quantized", 8, "group"),
    "int8-channel": ints("int-quantized", 8, "channel"),
    "int8-asymmetric": ints("naive-quantized", 8, "channel", symmetric=False),
    "int8-tensor": ints("int-quantized", 8, "tensor"),
    "nvfp4": fp4("nvfp4-pack-quantized", "tensor_group", 16),
    "mxfp4": fp4("mxfp4-pack-quantized", "group", 32),
    "modelopt-fp8": modelopt("FP8"),
    "modelopt-nvfp4": modelopt("NVFP4", group_size=16),
    "nf4": bitsandbytes("nf4", False),
    "nf4-nested": bitsandbytes("nf4", True),
    "fp4": bitsandbytes("fp4", False),
    "mxfp8": compressed("mxfp8-quantized", {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32}),
    "fbgemm": {"quant_method": "fbgemm_fp8", "modules_to_not_convert": ["lm_head"], "activation_scale_ub": 1200.0},
    "quark-fp8": quark("fp8_e4m3", "per_tensor"),
    "quark-fp8-channel": quark("fp8_e4m3", "per_channel"),
    "quark-mxfp4": quark("fp4", "per_group", group_size=32, scale_format="e8m0"),
    "gptq-8-bits": gptq(bits=8, dynamic={"-:.*self_attn.*": {}}),
}
# the library no longer reads groups in another order
COMPRESSED = [name for name in FORMATS if "config_groups" in FORMATS[name] and not name.endswith("-order")]


def pack(module: str, weight: torch.Tensor, fields: dict[str, Any]) -> tuple[Tensors, torch.Tensor]:
    parts, unpacked = packer_of(fields)(weight, fields)
    return {f"{module}.{part}": tensor.contiguous() for part, tensor in parts.items()}, unpacked


def weights_of(fields: dict[str, Any]) -> dict[str, Any]:
    group: dict[str, Any] = fields["config_groups"]["group_0"]["weights"]
    return group


def pack_floats(weight: torch.Tensor, fields: dict[str, Any]) -> tuple[Tensors, torch.Tensor]:
    """E4M3 values times their factors; a scale for activations that is to be ignored."""
    rows, columns = weight.shape
    name, dtype, extra = "weight_scale", torch.float32, "input_scale"
    scale_shape: tuple[int, ...] | None = None
    if fields["quant_method"] == "fbgemm_fp8":
        block, dtype = (1, columns), torch.bfloat16
    elif fields["quant_method"] == "quark":
        is_row = fields["global_quant_config"]["weight"]["qscheme"] == "per_channel"
        block, scale_shape = (1 if is_row else rows, columns), (rows,) if is_row else (1,)
        dtype = torch.bfloat16
    elif fields["quant_method"] in ("fp8", "modelopt"):
        block, scale_shape = (rows, columns), ()
        if "weight_block_size" in fields:
            name, extra = "weight_scale_inv", "activation_scale"
    else:
        how, dtype = weights_of(fields), torch.bfloat16
        block = {"channel": (1, columns), "tensor": (rows, columns), "group": (1, 32)}.get(how["strategy"]) or how[
            "block_structure"
        ]
        scale_shape = (1,) if how["strategy"] == "tensor" else None
    cells = weight.unflatten(0, (-1, block[0])).unflatten(2, (-1, block[1]))  # type: ignore[no-untyped-call]
    scale = (cells.abs().amax((1, 3)) / 440).to(dtype)
    if fields.get("format") == "mxfp8-quantized":
        scale = (torch.log2(scale.float()).ceil() + 127).to(torch.uint8)
    wide = (torch.exp2(scale.float() - 127) if scale.dtype == torch.uint8 else scale.float())[:, None, :, None]
    packed = (cells / wide).to(torch.float8_e4m3fn)
    tensors = {"weight": packed.reshape(rows, columns), name: scale if scale_shape is None else scale.view(scale_shape)}
    return {**tensors, extra: torch.tensor(1.0)}, (packed.float() * wide).reshape(rows, columns)


def words_of(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Neighbours of the first dimension in one int32, the first in the lowest bits."""
    per_word = 32 // bits
    assert values.min() >= 0
    assert values.max() < 1 << bits
    words = sum(values[each::per_word].to(torch.int64) << bits * each for each in range(per_word))
    assert isinstance(words, torch.Tensor)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def quantize(weight: torch.Tensor, group: torch.Tensor, bits: int, symmetric: bool) -> tuple[torch.Tensor, ...]:
    """Return unsigned values, factors and zero points [rows, groups], and the weight; `group` is that of a column."""
    top = (1 << bits) - 1
    scales, zeros = [], []
    for each in range(int(group.max()) + 1):
        part = weight[:, group == each]
        low, high = part.amin(1).clamp(max=-1e-3), part.amax(1).clamp(min=1e-3)
        scale = torch.maximum(-low, high) * 2 / (top - 1) if symmetric else (high - low) / (top - 1)
        scales.append(scale.half())
        zeros.append(torch.full_like(low, 1 << bits - 1) if symmetric else (-low / scale).round().clamp(1, top))
    scale, zero = torch.stack(scales, 1), torch.stack(zeros, 1)
    values = (weight / scale.float()[:, group] + zero[:, group]).round().clamp(0, top)
    return values.int(), scale, zero.int(), (values - zero[:, group]) * scale.float()[:, group]


def groups_of(columns: int, size: int, shuffled: bool) -> torch.Tensor:
    group = torch.arange(columns) // (columns if size == -1 else size)
    return group[torch.randperm(columns, generator=torch.Generator().manual_seed(3))] if shuffled else group


def pack_gptq(weight: torch.Tensor, fields: dict[str, Any]) -> tuple[Tensors, torch.Tensor]:
    """Words run down the transposed matrix; the first version stores zero points less one."""
    bits, offset = fields["bits"], 0 if fields.get("checkpoint_format") == "gptq_v2" else 1
    group = groups_of(weight.shape[1], fields["group_size"], fields["desc_act"])
    values, scale, zero, unpacked = quantize(weight, group, bits, fields["sym"])
    zeros = words_of(zero - offset, bits).t()
    tensors = {"qweight": words_of(values.t(), bits), "qzeros": zeros, "scales": scale.t(), "g_idx": group.int()}
    return tensors, unpacked


def pack_awq(weight: torch.Tensor, fields: dict[str, Any]) -> tuple[Tensors, torch.Tensor]:
    """Words run along the outputs of the transposed matrix, even ones of eight first."""
    group = groups_of(weight.shape[1], fields["group_size"], False)
    values, scale, zero, unpacked = quantize(weight, group, 4, False)
    order = [8 * word + each for word in range(len(weight) // 8) for each in (0, 2, 4, 6, 1, 3, 5, 7)]
    words = {"qweight": words_of(values[order], 4).t(), "qzeros": words_of(zero[order], 4).t()}
    return {**words, "scales": scale.t()}, unpacked


def pack_ints(weight: torch.Tensor, fields: dict[str, Any]) -> tuple[Tensors, torch.Tensor]:
    """Integers of compressed-tensors: 8 bits as they are around zero, or words along the inputs."""
    how, is_packed_in_words = weights_of(fields), fields["format"] == "pack-quantized"
    bits, is_symmetric, is_ordered = how["num_bits"], how["symmetric"], how.get("actorder") == "group"
    group = groups_of(weight.shape[1], how.get("group_size", -1), is_ordered)
    if how["strategy"] == "tensor":
        values, scale, zero, unpacked = quantize(weight.flatten()[None], torch.zeros(weight.numel()).long(), bits, True)
        values, unpacked, scale = values.view(weight.shape), unpacked.view(weight.shape), scale.flatten()
    else:
        values, scale, zero, unpacked = quantize(weight, group, bits, is_symmetric)
    if not is_packed_in_words:
        zeros = {} if is_symmetric else {"weight_zero_point": (zero - 128).to(torch.int8)}
        return {"weight": (values - 128).to(torch.int8), "weight_scale": scale, **zeros}, unpacked
    tensors = {"weight_packed": words_of(values.t(), bits).t(), "weight_scale": scale}
    tensors |= {} if is_symmetric else {"weight_zero_point": words_of(zero, bits)}
    tensors |= {"weight_g_idx": group.int()} if is_ordered else {}
    return {**tensors, "weight_shape": torch.tensor(weight.shape)}, unpacked


def pack_fp4(weight: torch.Tensor, fields: dict[str, Any]) -> tuple[Tensors, torch.Tensor]:
    """Two E2M1 values to a byte, the first in its lower half; factors are E4M3, or exponents of two."""
    is_quark = fields.get("quant_method") == "quark"
    is_mx = is_quark or fields.get("format", "").startswith("mx")
    cells = weight.unflatten(1, (-1, 32 if is_mx else 16))  # type: ignore[no-untyped-call]
    factors = cells.abs().amax(2) / 6
    whole = factors.max() / 448
    if is_mx:
        exponents = torch.log2(factors).ceil() + 127
        scales, wide = exponents.to(torch.uint8), torch.exp2(exponents - 127)
    else:
        scales = (factors / whole).to(torch.float8_e4m3fn)
        wide = scales.float() * whole
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    ratio = cells / wide[:, :, None]
    codes = (ratio.abs()[..., None] - table).abs().argmin(-1)
    unpacked = (table[codes] * ratio.sign() * wide[:, :, None]).flatten(1)
    codes = (codes + 8 * (ratio < 0)).flatten(1)
    pairs = (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8)
    if is_mx:
        return {"weight" if is_quark else "weight_packed": pairs, "weight_scale": scales}, unpacked
    if fields["quant_method"] == "modelopt":
        extra = {"weight_scale_2": whole, "input_scale": torch.tensor(1.0)}
        return {"weight": pairs, "weight_scale": scales, **extra}, unpacked
    extra = {"weight_global_scale": 1 / whole[None], "input_global_scale": torch.ones(1)}
    return {"weight_packed": pairs, "weight_scale": scales, **extra}, unpacked


# values of the codes 0 to 15; quantiles of a normal distribution, and E2M1 without its zeros' exponent
BITSANDBYTES = {
    "nf4": [
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
        *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
        *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
        *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ],
    "fp4": [sign * each / 12 for sign in (1, -1) for each in (0, 0.0625, 8, 12, 4, 6, 2, 3)],
}


def pack_bitsandbytes(weight: torch.Tensor, fields: dict[str, Any]) -> tuple[Tensors, torch.Tensor]:
    """Runs of 64 weights of the flat matrix share a factor; with nesting, so do runs of 256 factors less their mean."""
    table, blocks = torch.tensor(BITSANDBYTES[fields["bnb_4bit_quant_type"]]), weight.reshape(-1, 64)
    factors = blocks.abs().amax(1)
    absmax, state = factors, {"quant_type": fields["bnb_4bit_quant_type"], "blocksize": 64, "dtype": "float32"}
    tensors = {"weight.quant_map": table}
    if fields["bnb_4bit_use_double_quant"]:
        offset, codes = float(factors.mean()), torch.linspace(-1, 1, 256)
        largest = torch.nn.functional.pad((factors - offset).abs(), (0, -len(factors) % 256)).view(-1, 256).amax(1)
        wide = largest.repeat_interleave(256)[: len(factors)]
        absmax = (((factors - offset) / wide)[:, None] - codes).abs().argmin(1).to(torch.uint8)
        factors = codes[absmax.long()] * wide + offset
        tensors |= {"weight.nested_absmax": largest, "weight.nested_quant_map": codes}
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
    patterns = ((blocks / factors[:, None])[..., None] - table).abs().argmin(-1)
    unpacked = (table[patterns] * factors[:, None]).view(weight.shape)
    pairs = patterns.view(-1, 2)
    said = json.dumps(state | {"shape": list(weight.shape)}).encode()
    name = f"weight.quant_state.bitsandbytes__{fields['bnb_4bit_quant_type']}"
    tensors |= {"weight": (pairs[:, :1] << 4 | pairs[:, 1:]).to(torch.uint8), "weight.absmax": absmax}
    return {**tensors, name: torch.tensor(list(said), dtype=torch.uint8)}, unpacked


def packer_of(fields: dict[str, Any]) -> Callable[..., tuple[Tensors, torch.Tensor]]:
    if fields["quant_method"] == "compressed-tensors":
        kind = weights_of(fields)["type"]
        return pack_ints if kind == "int" else pack_fp4 if weights_of(fields)["num_bits"] == 4 else pack_floats
    if fields["quant_method"] == "quark":
        return pack_fp4 if fields["global_quant_config"]["weight"]["dtype"] == "fp4" else pack_floats
    if fields["quant_method"] == "modelopt":
        return pack_fp4 if fields["quant_algo"] == "NVFP4" else pack_floats
    return PACKERS[fields["quant_method"]]


PACKERS = {
    "fp8": pack_floats,
    "fbgemm_fp8": pack_floats,
    "gptq": pack_gptq,
    "awq": pack_awq,
    "bitsandbytes": pack_bitsandbytes,
}
