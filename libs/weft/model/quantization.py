"""Quantized checkpoints: what config.json says of them, and the tensors, shapes and dtypes of each linear module.

`METHODS` has an entry for each `quant_method`, `stored_parts` a case for each packing, and `weft.model.unpacking` a
reader for each packing. Quantized activations are computed in full precision: only weights are read. No torch.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Container
from dataclasses import dataclass
from functools import cache, lru_cache

from weft.model.fields import Fields
from weft.model.spec import Packing, Quantization

FLOATS = ("F32", "F16", "BF16")
# of activations and of the KV cache, which both have the dtype of the computation here
ACTIVATION_SCALES = (".input_scale", ".activation_scale", ".input_zero_point", ".input_global_scale", ".qscale_act")
KV_SCALES = (".k_scale", ".v_scale", ".q_scale", ".kv_scale", ".output_scale")
# the names of FP4's weights, the dtype of their groups' factors, and the name of the tensor's own one
FP4_SCALES = {
    Packing.NVFP4: ("weight_packed", "F8_E4M3", "weight_global_scale"),
    Packing.NVFP4_MODELOPT: ("weight", "F8_E4M3", "weight_scale_2"),
    Packing.MXFP4: ("weight_packed", "U8", ""),
    Packing.MXFP4_QUARK: ("weight", "U8", ""),
}
# weights that share a factor in bitsandbytes, and factors that share one; no field changes them
NF4_BLOCK, NESTED_BLOCK = 64, 256
ANY_LENGTH = -1
INSTEAD = "take the checkpoint in BF16, or one in another format"


@dataclass(frozen=True, slots=True)
class StoredPart:
    """A tensor of a packed module: its shape and dtypes, by safetensors' names.

    An item takes `stored_bytes` in the file and `held_bytes` in a GPU's memory, where 0 means that the tensor is not
    held. It holds `num_values` weights. With ANY_LENGTH, the whole tensor is one item.
    """

    shape: tuple[int, ...]
    dtypes: tuple[str, ...]
    stored_bytes: int
    held_bytes: int = 0
    num_values: int = 0


def full_block(how: Quantization, shape: tuple[int, int]) -> tuple[int, int]:
    """Return rows and columns that share a factor in a matrix of this shape."""
    return how.block[0] or shape[0], how.block[1] or shape[1]


def expert_parts(how: Quantization, shape: tuple[int, int, int]) -> dict[str, StoredPart]:
    """Return the tensors of packed experts [experts, outputs, inputs], by the last part of their names."""
    groups = *shape[:2], -(-shape[2] // how.block[1])
    blocks = StoredPart((*groups, how.block[1] // 2), ("U8",), 1, 0, 2)
    return {"blocks": blocks, "scales": StoredPart(groups, ("U8",), 1)}


def stored_parts(how: Quantization, shape: tuple[int, int]) -> dict[str, StoredPart]:
    """Return the tensors of a packed module of this shape, by the last part of their names."""
    rows, columns = shape
    blocks = tuple(-(-size // block) for size, block in zip(shape, full_block(how, shape), strict=True))
    if how.packing is Packing.FP8_BLOCKS:
        factors = blocks if any(how.block) else (1,)
        scale = StoredPart(factors, FLOATS, 4 if how.scale == "weight_scale_inv" else 2, 4)
        return {"weight": StoredPart(shape, ("F8_E4M3",), 1, 1, 1), how.scale: scale}
    if how.packing is Packing.MXFP8:
        return {"weight": StoredPart(shape, ("F8_E4M3",), 1, 1, 1), how.scale: StoredPart(blocks, ("U8",), 1, 4)}
    if how.packing is Packing.INT8:
        factors = blocks if any(how.block) else (1,)
        zeros = {} if how.is_symmetric else {"weight_zero_point": StoredPart(factors, ("I8",), 1)}
        weight = StoredPart(shape, ("I8",), 1, 0, 1)
        return {"weight": weight, "weight_scale": StoredPart(factors, FLOATS, 2), **zeros}
    if how.packing in FP4_SCALES:
        name, dtype, whole = FP4_SCALES[how.packing]
        pairs, scales = StoredPart((rows, columns // 2), ("U8",), 1, 0, 2), StoredPart(blocks, (dtype,), 1)
        return {name: pairs, "weight_scale": scales} | ({whole: StoredPart((1,), FLOATS, 4)} if whole else {})
    if how.packing is Packing.BITSANDBYTES:
        return _bitsandbytes_parts(how, rows * columns)
    per_word = 32 // how.bits
    if how.packing is Packing.AWQ:
        return {
            "qweight": StoredPart((columns, -(-rows // per_word)), ("I32",), 4, 4, per_word),
            "qzeros": StoredPart((blocks[1], -(-rows // per_word)), ("I32",), 4, per_word),
            "scales": StoredPart((blocks[1], rows), FLOATS, 2, 2),
        }
    if how.packing is Packing.GPTQ:
        return {
            "qweight": StoredPart((-(-columns // per_word), rows), ("I32",), 4, 4, per_word),
            # held as a byte for each zero point
            "qzeros": StoredPart((blocks[1], -(-rows // per_word)), ("I32",), 4, 0 if how.is_symmetric else per_word),
            "scales": StoredPart((blocks[1], rows), FLOATS, 2, 2),
            "g_idx": StoredPart((columns,), ("I32",), 4),
        }
    parts = {
        "weight_packed": StoredPart((rows, -(-columns // per_word)), ("I32",), 4, 4, per_word),
        "weight_scale": StoredPart(blocks, FLOATS, 2, 2),
        "weight_shape": StoredPart((2,), ("I32", "I64"), 8),
    }
    if not how.is_symmetric:
        parts["weight_zero_point"] = StoredPart((-(-rows // per_word), blocks[1]), ("I32",), 4, per_word)
    return parts | ({"weight_g_idx": StoredPart((columns,), ("I32",), 4)} if how.is_ordered else {})


def _bitsandbytes_parts(how: Quantization, num_weights: int) -> dict[str, StoredPart]:
    num_blocks = -(-num_weights // NF4_BLOCK)
    parts = {
        "weight": StoredPart((-(-num_weights // 2), 1), ("U8",), 1, 0, 2),
        "weight.absmax": StoredPart((num_blocks,), ("U8",) if how.is_nested else FLOATS, 1 if how.is_nested else 4),
        "weight.quant_map": StoredPart((16,), FLOATS, 4),
    }
    if how.is_nested:
        parts["weight.nested_absmax"] = StoredPart((-(-num_blocks // NESTED_BLOCK),), FLOATS, 4)
        parts["weight.nested_quant_map"] = StoredPart((256,), FLOATS, 4)
    return parts | {how.scale: StoredPart((ANY_LENGTH,), ("U8",), 170 if how.is_nested else 80)}


def packed_shapes(name: str, shape: tuple[int, int], how: Quantization | None) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of the tensors that hold the linear weight `name`: itself, if it is not packed."""
    module = name.removesuffix(".weight")
    if how is None or how.is_of_experts or not name.endswith(".weight") or _is_skipped(module, how):
        return {name: shape}
    return {f"{module}.{part}": stored.shape for part, stored in stored_parts(how, shape).items()}


def expert_shapes(name: str, shape: tuple[int, int, int], how: Quantization | None) -> dict[str, tuple[int, ...]]:
    """Return last parts of names, and shapes, of the packed tensors of fused experts `name`; none if they are plain.

    shape: experts, outputs, inputs.
    """
    if how is None or not how.is_of_experts or _is_skipped(name, how):
        return {}
    return {part: stored.shape for part, stored in expert_parts(how, shape).items()}


def is_packed(module: str, names: Container[str], how: Quantization | None) -> bool:
    """Return True if the tensors `names` hold the linear module or the fused experts packed."""
    return how is not None and f"{module}{_separator(how)}{_last_part(how)}" in names


def part_of(name: str, names: Container[str], how: Quantization | None) -> StoredPart | None:
    """Return the part, with the shape of a single value, that a tensor is of a packed module; None for a plain one."""
    for last, part in _parts(how).items() if how is not None else ():
        module = name.removesuffix(f"{_separator(how)}{last}")
        if module != name and is_packed(module, names, how):
            return part
    return None


def stored_dtypes(name: str, names: Container[str], how: Quantization | None) -> tuple[str, ...]:
    """Return the dtypes that a tensor may have, by safetensors' names; `names` are those of the model's tensors."""
    part = part_of(name, names, how)
    return part.dtypes if part else FLOATS


def is_shape(found: tuple[int, ...], expected: tuple[int, ...]) -> bool:
    """Return True for the expected shape. A tensor of one number may have any number of dimensions.

    One column may lack its second dimension, as factors of rows do in Quark.
    """
    if expected == (ANY_LENGTH,):
        return len(found) == 1
    return found == expected or (*found, 1) == expected or (expected == (1,) and all(size == 1 for size in found))


def _separator(how: Quantization | None) -> str:
    """Return what stands before the last part of the name of a packed tensor."""
    return "_" if how is not None and how.is_of_experts else "."


@lru_cache(maxsize=16)
def _parts(how: Quantization) -> dict[str, StoredPart]:
    return expert_parts(how, (1, 1, 1)) if how.is_of_experts else stored_parts(how, (1, 1))


@lru_cache(maxsize=16)
def _last_part(how: Quantization) -> str:
    """Return the name of a tensor that only packed modules have."""
    return next(part for part in reversed(_parts(how)) if part != "weight")


def _is_skipped(module: str, how: Quantization) -> bool:
    return bool(how.skipped) and _compiled(how.skipped).match(module) is not None


@cache
def _compiled(patterns: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(f"(?:{pattern})" for pattern in patterns))


def read_quantization(fields: Fields) -> Quantization | None:
    """Raises BadCheckpoint for methods, formats and options that are not supported."""
    # MLX writes one of the two fields, or both
    for name in ("quantization", "quantization_config"):
        said = fields.values.get(name)
        if isinstance(said, dict) and "quant_method" not in said and {"bits", "group_size"} <= said.keys():
            what = "weights packed for Apple's MLX are not read; take the checkpoint that they were made of"
            raise fields.error(name, what)
    if not fields.values.get("quantization_config"):
        return None
    inner = fields.nested("quantization_config")
    method = inner.values.get("quant_method")
    if method not in METHODS:
        raise _refusal(inner, "quant_method", tuple(METHODS))
    return METHODS[method](inner)


def _refusal(fields: Fields, name: str, supported: tuple[str, ...]) -> Exception:
    what = f"{fields.values.get(name)!r} is not supported; supported: {', '.join(supported)}; {INSTEAD}"
    return fields.error(name, what)


def _skip_names(names: list[str]) -> tuple[str, ...]:
    """Return an expression for whole parts of a module's name: one, as lists of hundreds are common."""
    return (rf"(.*\.)?({'|'.join(map(re.escape, names))})(\..*)?$",) if names else ()


def _skip_globs(names: list[str]) -> tuple[str, ...]:
    """Return expressions for names of modules with asterisks, and for what is inside them."""
    return tuple(fnmatch.translate(each) for name in names for each in (name, name + ".*"))


def _fp8(inner: Fields) -> Quantization:
    """Read block-scaled FP8, or FP8 with a factor for each tensor as transformers or AutoFP8 names it.

    `scale_name` is a field of `weft convert`, for names of Mistral's own layout.
    """
    if (inner.values.get("fmt") or "e4m3") != "e4m3":
        raise _refusal(inner, "fmt", ("e4m3",))
    inner.choice("activation_scheme", ("dynamic", "static"), "dynamic")
    block = inner.integers("weight_block_size", [])
    if block and (len(block) != 2 or 0 in block):
        raise inner.error("weight_block_size", f"expected rows and columns of a block, found {block!r}")
    skipped = _skip_names(inner.strings("modules_to_not_convert") + inner.strings("ignored_layers"))
    if block:
        return Quantization(Packing.FP8_BLOCKS, (block[0], block[1]), skipped)
    # transformers writes all fields of its own class, null or not
    is_own = {"weight_block_size", "modules_to_not_convert"} & inner.values.keys()
    scale = str(inner.values.get("scale_name") or ("weight_scale_inv" if is_own else "weight_scale"))
    return Quantization(Packing.FP8_BLOCKS, (0, 0), skipped, scale)


def _compressed(inner: Fields) -> Quantization:
    """Read compressed-tensors: one group of all linear modules but those to `ignore`."""
    if inner.values.get("format") not in COMPRESSED:
        raise _refusal(inner, "format", tuple(COMPRESSED))
    for name in ("transform_config", "sparsity_config"):
        if inner.nested(name).values.get("format", "") != "dense" and inner.values.get(name):
            raise inner.error(name, f"is not supported; {INSTEAD}")
    groups = list(inner.nested("config_groups").values)
    if len(groups) != 1:
        raise inner.error("config_groups", f"expected one group, found {groups!r}; {INSTEAD}")
    group = inner.nested("config_groups").nested(groups[0])
    if group.strings("targets") != ["Linear"]:
        raise group.error("targets", f"expected ['Linear'], found {group.strings('targets')!r}; {INSTEAD}")
    weights = group.nested("weights")
    return COMPRESSED[inner.values["format"]](weights, _ignored(inner))


def _bytes(weights: Fields, ignored: tuple[str, ...]) -> Quantization:
    kind = weights.choice("type", ("float", "int"), "")
    is_symmetric = weights.boolean("symmetric", True)
    if weights.integer("num_bits") != 8 or (kind == "float" and not is_symmetric):
        raise weights.error("num_bits", f"only symmetric FP8 and INT8 are supported; {INSTEAD}")
    if kind == "float":
        return Quantization(Packing.FP8_BLOCKS, _block(weights), ignored, "weight_scale")
    return Quantization(Packing.INT8, _block(weights), ignored, bits=8, is_symmetric=is_symmetric)


def _block(weights: Fields) -> tuple[int, int]:
    """Return rows and columns that share a factor, 0 for all, by compressed-tensors' strategy."""
    strategy = weights.choice("strategy", ("group", "channel", "tensor", "block"), "")
    if strategy == "block":
        block = weights.integers("block_structure")
        if len(block) != 2 or 0 in block:
            raise weights.error("block_structure", f"expected rows and columns of a block, found {block!r}")
        return block[0], block[1]
    if strategy == "group":
        return 1, weights.integer("group_size")
    return (1, 0) if strategy == "channel" else (0, 0)


def _words(weights: Fields, ignored: tuple[str, ...]) -> Quantization:
    weights.choice("type", ("int",), "")
    weights.choice("strategy", ("group", "channel"), "")
    bits, order = weights.integer("num_bits"), weights.values.get("actorder")
    if bits not in (4, 8):
        raise weights.error("num_bits", f"{bits} is not supported; supported: 4, 8; {INSTEAD}")
    # "weight" and "static" say in which order they were rounded; the columns lie as ever
    if order not in (None, False, "weight", "static", "group", "dynamic"):
        raise weights.error("actorder", f"{order!r} is not supported; supported: group, weight, static; {INSTEAD}")
    is_symmetric = weights.boolean("symmetric", True)
    is_ordered = order in ("group", "dynamic")
    block = _block(weights)
    return Quantization(
        Packing.INT4_GROUPS, block, ignored, bits=bits, is_symmetric=is_symmetric, is_ordered=is_ordered
    )


def _mxfp8(weights: Fields, ignored: tuple[str, ...]) -> Quantization:
    weights.choice("type", ("float",), "")
    weights.choice("strategy", ("group",), "")
    if weights.integer("num_bits") != 8 or weights.integer("group_size") != 32:
        raise weights.error("group_size", f"only 8 bits in groups of 32 are supported; {INSTEAD}")
    return Quantization(Packing.MXFP8, (1, 32), ignored, "weight_scale")


def _fp4(packing: Packing, size: int, strategy: str) -> Callable[[Fields, tuple[str, ...]], Quantization]:
    def read(weights: Fields, ignored: tuple[str, ...]) -> Quantization:
        weights.choice("type", ("float",), "")
        weights.choice("strategy", (strategy,), "")
        if weights.integer("num_bits") != 4 or weights.integer("group_size") != size:
            raise weights.error("group_size", f"only 4 bits in groups of {size} are supported; {INSTEAD}")
        return Quantization(packing, (1, size), ignored)

    return read


COMPRESSED = {
    "pack-quantized": _words,
    "float-quantized": _bytes,
    "int-quantized": _bytes,
    "naive-quantized": _bytes,
    "nvfp4-pack-quantized": _fp4(Packing.NVFP4, 16, "tensor_group"),
    "mxfp8-quantized": _mxfp8,
    "mxfp4-pack-quantized": _fp4(Packing.MXFP4, 32, "group"),
}


def _ignored(inner: Fields) -> tuple[str, ...]:
    """Return expressions for compressed-tensors' `ignore`: names, or expressions after re:."""
    names = inner.strings("ignore")
    for name in names:
        try:
            re.compile(name.removeprefix("re:"))
        except re.error as error:
            raise inner.error("ignore", f"{name!r} is no regular expression: {error}") from None
    return tuple(each.removeprefix("re:") if each.startswith("re:") else re.escape(each) + "$" for each in names)


def _gptq(inner: Fields) -> Quantization:
    """Read GPTQ of AutoGPTQ and GPTQModel. `desc_act` leaves the groups' columns in any order."""
    bits = inner.integer("bits")
    if bits not in (4, 8):
        raise inner.error("bits", f"{bits} is not supported; supported: 4, 8; {INSTEAD}")
    version = inner.choice("checkpoint_format", ("gptq", "gptq_v2"), "gptq")
    if inner.boolean("lm_head"):
        raise inner.error("lm_head", f"a quantized head is not supported; {INSTEAD}")
    size = inner.values.get("group_size")
    skipped = []
    for pattern in inner.nested("dynamic").values:
        if not pattern.startswith("-:"):
            raise inner.error("dynamic", f"{pattern!r} has other settings, which is not supported; {INSTEAD}")
        skipped.append(pattern.removeprefix("-:"))
    return Quantization(
        Packing.GPTQ,
        (1, 0 if size == -1 else inner.integer("group_size")),
        tuple(skipped) + _skip_names(inner.strings("modules_to_not_convert")),
        bits=bits,
        is_symmetric=inner.boolean("sym", True),
        is_ordered=inner.boolean("desc_act"),
        zero_offset=0 if version == "gptq_v2" else 1,
    )


def _awq(inner: Fields) -> Quantization:
    """Read AWQ of AutoAWQ's GEMM version, which has zero points."""
    if (bits := inner.integer("bits")) != 4:
        raise inner.error("bits", f"{bits} is not supported; supported: 4; {INSTEAD}")
    if str(inner.values.get("version") or "gemm").lower() != "gemm":
        raise _refusal(inner, "version", ("gemm",))
    if not inner.boolean("zero_point", True):
        raise inner.error("zero_point", f"false is not supported; supported: true; {INSTEAD}")
    skipped = _skip_names(inner.strings("modules_to_not_convert"))
    size = inner.values.get("group_size")
    block = (1, 0 if size == -1 else inner.integer("group_size"))
    return Quantization(Packing.AWQ, block, skipped, is_symmetric=False)


def _modelopt(inner: Fields) -> Quantization:
    """Read ModelOpt's FP8, with a factor for each tensor, and NVFP4; names to leave out may hold asterisks."""
    skipped = _skip_globs(inner.strings("ignore") + inner.strings("exclude_modules"))
    algorithm = inner.values.get("quant_algo")
    if algorithm == "FP8":
        return Quantization(Packing.FP8_BLOCKS, (0, 0), skipped, "weight_scale")
    if algorithm != "NVFP4":
        raise _refusal(inner, "quant_algo", ("FP8", "NVFP4"))
    if (size := inner.integer("group_size", 16)) != 16:
        raise inner.error("group_size", f"{size} is not supported; supported: 16; {INSTEAD}")
    return Quantization(Packing.NVFP4_MODELOPT, (1, 16), skipped)


def _bitsandbytes(inner: Fields) -> Quantization:
    """Read 4 bits of bitsandbytes; its factors may be quantized too. Without a list, the head is left out."""
    if inner.boolean("load_in_8bit") or not inner.boolean("load_in_4bit"):
        raise inner.error("load_in_8bit", f"only 4 bits (load_in_4bit) are supported; {INSTEAD}")
    kind = inner.choice("bnb_4bit_quant_type", ("nf4", "fp4"), "fp4")
    if (storage := inner.values.get("bnb_4bit_quant_storage") or "uint8") != "uint8":
        raise inner.error("bnb_4bit_quant_storage", f"{storage!r} is not supported; supported: uint8; {INSTEAD}")
    return Quantization(
        Packing.BITSANDBYTES,
        (1, NF4_BLOCK),
        _skip_names(inner.strings("llm_int8_skip_modules")),
        f"weight.quant_state.bitsandbytes__{kind}",
        is_symmetric=False,
        is_nested=inner.boolean("bnb_4bit_use_double_quant"),
    )


def _mxfp4(inner: Fields) -> Quantization:
    """Read gpt-oss: groups of 32 weights along the inputs of each expert."""
    return Quantization(Packing.MXFP4_EXPERTS, (1, 32), _skip_globs(inner.strings("modules_to_not_convert")))


def _fbgemm(inner: Fields) -> Quantization:
    """Read FP8 of FBGEMM, with a factor for each row."""
    skipped = _skip_names(inner.strings("modules_to_not_convert"))
    return Quantization(Packing.FP8_BLOCKS, (1, 0), skipped, "weight_scale")


def _quark(inner: Fields) -> Quantization:
    """Read AMD Quark: FP8 with a factor per tensor or row, or MXFP4. `exclude` has names, asterisks, or re: before."""
    whole = inner.nested("global_quant_config")
    weight = whole.nested("weight")
    for name in ("layer_quant_config", "layer_type_quant_config"):
        others = inner.nested(name)
        for pattern in others.values:  # those of a quantized KV cache differ in their outputs alone
            if others.nested(pattern).values.get("weight", weight.values) != weight.values:
                raise inner.error(name, f"{pattern!r} has weights of its own, which is not supported; {INSTEAD}")
    names = inner.strings("exclude")
    expressions = tuple(name.removeprefix("re:") for name in names if name.startswith("re:"))
    skipped = _skip_globs([name for name in names if not name.startswith("re:")]) + expressions
    kind = weight.values.get("dtype"), weight.values.get("qscheme")
    if kind in (("fp8_e4m3", "per_tensor"), ("fp8_e4m3", "per_channel")):
        block = (0, 0) if kind[1] == "per_tensor" else (1, 0)
        return Quantization(Packing.FP8_BLOCKS, block, skipped, "weight_scale")
    if kind != ("fp4", "per_group") or weight.values.get("scale_format") != "e8m0":
        supported = ("fp8_e4m3 per_tensor or per_channel", "fp4 per_group with scale_format e8m0")
        raise _refusal(weight, "dtype", supported)
    if (size := weight.integer("group_size")) != 32:
        raise weight.error("group_size", f"{size} is not supported; supported: 32; {INSTEAD}")
    return Quantization(Packing.MXFP4_QUARK, (1, 32), skipped)


METHODS = {
    "fp8": _fp8,
    "compressed-tensors": _compressed,
    "gptq": _gptq,
    "awq": _awq,
    "modelopt": _modelopt,
    "bitsandbytes": _bitsandbytes,
    "quark": _quark,
    "fbgemm_fp8": _fbgemm,
    "mxfp4": _mxfp4,
}
