"""Quantized checkpoints: what config.json says of them, and the tensors, shapes and dtypes of each linear module.

`METHODS` has an entry for each `quant_method`, `stored_parts` a case for each packing, and `weft.model.unpacking` a
reader for each packing. Quantized activations are computed in full precision: only weights are read. No torch.
"""

from __future__ import annotations

import re
from collections.abc import Container
from dataclasses import dataclass
from functools import cache, lru_cache

from weft.model.fields import Fields
from weft.model.spec import Packing, Quantization

FLOATS = ("F32", "F16", "BF16")
# of activations and of the KV cache, which both have the dtype of the computation here
ACTIVATION_SCALES = (".input_scale", ".activation_scale", ".input_zero_point")
KV_SCALES = (".k_scale", ".v_scale", ".q_scale", ".kv_scale", ".output_scale")
INSTEAD = "take the checkpoint in BF16, or one in another format"


@dataclass(frozen=True, slots=True)
class StoredPart:
    """A tensor of a packed module: its shape and dtypes, by safetensors' names.

    An item takes `stored_bytes` in the file and `held_bytes` in a GPU's memory, where 0 means that the tensor is not
    held. It holds `num_values` weights.
    """

    shape: tuple[int, ...]
    dtypes: tuple[str, ...]
    stored_bytes: int
    held_bytes: int = 0
    num_values: int = 0


def full_block(how: Quantization, shape: tuple[int, int]) -> tuple[int, int]:
    """Return rows and columns that share a factor in a matrix of this shape."""
    return how.block[0] or shape[0], how.block[1] or shape[1]


def stored_parts(how: Quantization, shape: tuple[int, int]) -> dict[str, StoredPart]:
    """Return the tensors of a packed module of this shape, by the last part of their names."""
    rows, columns = shape
    blocks = tuple(-(-size // block) for size, block in zip(shape, full_block(how, shape), strict=True))
    if how.packing is Packing.FP8_BLOCKS:
        factors = blocks if any(how.block) else (1,)
        scale = StoredPart(factors, FLOATS, 4 if how.scale == "weight_scale_inv" else 2, 4)
        return {"weight": StoredPart(shape, ("F8_E4M3",), 1, 1, 1), how.scale: scale}
    per_word = 32 // how.bits
    if how.packing is Packing.GPTQ:
        return {
            "qweight": StoredPart((-(-columns // per_word), rows), ("I32",), 4, 4, per_word),
            "qzeros": StoredPart((blocks[1], -(-rows // per_word)), ("I32",), 4),
            "scales": StoredPart((blocks[1], rows), FLOATS, 2, 2),
            "g_idx": StoredPart((columns,), ("I32",), 4),
        }
    return {
        "weight_packed": StoredPart((rows, -(-columns // per_word)), ("I32",), 4, 4, per_word),
        "weight_scale": StoredPart(blocks, FLOATS, 2, 2),
        "weight_shape": StoredPart((2,), ("I32", "I64"), 8),
    }


def packed_shapes(name: str, shape: tuple[int, int], how: Quantization | None) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of the tensors that hold the linear weight `name`: itself, if it is not packed."""
    module = name.removesuffix(".weight")
    if how is None or not name.endswith(".weight") or _is_skipped(module, how):
        return {name: shape}
    return {f"{module}.{part}": stored.shape for part, stored in stored_parts(how, shape).items()}


def is_packed(module: str, names: Container[str], how: Quantization | None) -> bool:
    """Return True if the tensors `names` hold the linear module packed."""
    return how is not None and f"{module}.{_last_part(how)}" in names


def part_of(name: str, names: Container[str], how: Quantization | None) -> StoredPart | None:
    """Return the part, with the shape of a single value, that a tensor is of a packed module; None for a plain one."""
    module, _, last = name.rpartition(".")
    return _parts(how).get(last) if how is not None and is_packed(module, names, how) else None


def stored_dtypes(name: str, names: Container[str], how: Quantization | None) -> tuple[str, ...]:
    """Return the dtypes that a tensor may have, by safetensors' names; `names` are those of the model's tensors."""
    part = part_of(name, names, how)
    return part.dtypes if part else FLOATS


def is_shape(found: tuple[int, ...], expected: tuple[int, ...]) -> bool:
    """Return True for the expected shape. A tensor of one number may have any number of dimensions."""
    return found == expected or (expected == (1,) and all(size == 1 for size in found))


@lru_cache(maxsize=16)
def _parts(how: Quantization) -> dict[str, StoredPart]:
    return stored_parts(how, (1, 1))


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
    if not fields.values.get("quantization_config"):
        return None
    inner = fields.nested("quantization_config")
    if "quant_method" not in inner.values and {"bits", "group_size"} <= inner.values.keys():
        what = "weights packed for Apple's MLX are not read; take the checkpoint that they were made of"
        raise fields.error("quantization_config", what)
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


def _fp8(inner: Fields) -> Quantization:
    """Read block-scaled FP8, or FP8 with a factor for each tensor as transformers or AutoFP8 names it."""
    inner.choice("fmt", ("e4m3",), "e4m3")
    inner.choice("activation_scheme", ("dynamic", "static"), "dynamic")
    block = inner.integers("weight_block_size", [])
    if block and (len(block) != 2 or 0 in block):
        raise inner.error("weight_block_size", f"expected rows and columns of a block, found {block!r}")
    skipped = _skip_names(inner.strings("modules_to_not_convert") + inner.strings("ignored_layers"))
    if block:
        return Quantization(Packing.FP8_BLOCKS, (block[0], block[1]), skipped)
    # transformers writes all fields of its own class, null or not
    is_own = {"weight_block_size", "modules_to_not_convert"} & inner.values.keys()
    return Quantization(Packing.FP8_BLOCKS, (0, 0), skipped, "weight_scale_inv" if is_own else "weight_scale")


def _compressed(inner: Fields) -> Quantization:
    """Read compressed-tensors: one group of all linear modules but those to `ignore`."""
    formats = ("pack-quantized", "float-quantized", "naive-quantized")
    if inner.values.get("format") not in formats:
        raise _refusal(inner, "format", formats)
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
    if inner.values["format"] == "pack-quantized":
        return _int4(weights, _ignored(inner))
    weights.choice("type", ("float",), "")
    if weights.integer("num_bits") != 8 or not weights.boolean("symmetric", True):
        raise weights.error("num_bits", f"only symmetric 8-bit weights are supported; {INSTEAD}")
    return Quantization(Packing.FP8_BLOCKS, _block(weights), _ignored(inner), "weight_scale")


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


def _int4(weights: Fields, ignored: tuple[str, ...]) -> Quantization:
    weights.choice("type", ("int",), "")
    weights.choice("strategy", ("group", "channel"), "")
    if weights.integer("num_bits") != 4 or not weights.boolean("symmetric", True):
        raise weights.error("num_bits", f"only symmetric 4-bit weights are supported; {INSTEAD}")
    # "weight" and "static" say in which order they were rounded; the columns lie as ever
    if weights.values.get("actorder") not in (None, False, "weight", "static"):
        raise weights.error("actorder", f"columns in another order are not supported; {INSTEAD}")
    return Quantization(Packing.INT4_GROUPS, _block(weights), ignored)


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


METHODS = {"fp8": _fp8, "compressed-tensors": _compressed, "gptq": _gptq}
