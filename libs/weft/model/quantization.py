"""Quantized checkpoints as they ship: which linear weights are packed, and as which tensors. No torch.

Block-scaled FP8 (DeepSeek, Kimi K2) and compressed-tensors' packed INT4 (Kimi K2.5).
"""

from __future__ import annotations

import re
from collections.abc import Container
from functools import cache

from weft.model.fields import Fields
from weft.model.spec import Packing, Quantization

INT4_PER_WORD = 8
FLOATS = ("F32", "F16", "BF16")


def read_quantization(fields: Fields) -> Quantization | None:
    """Raises BadCheckpoint for methods, formats and options that are not supported."""
    if not fields.values.get("quantization_config"):
        return None
    inner = fields.nested("quantization_config")
    if "quant_method" not in inner.values and {"bits", "group_size"} <= inner.values.keys():
        what = "weights packed for Apple's MLX are not read; take the checkpoint that they were made of"
        raise fields.error("quantization_config", what)
    method = inner.choice("quant_method", ("fp8", "compressed-tensors"), "")
    return _fp8(inner) if method == "fp8" else _int4(inner)


def packed_shapes(name: str, shape: tuple[int, int], how: Quantization | None) -> dict[str, tuple[int, ...]]:
    """The tensors in which the linear weight `name` ships, with their shapes; itself, when it is not packed."""
    module = name.removesuffix(".weight")
    if how is None or not name.endswith(".weight") or _is_skipped(module, how):
        return {name: shape}
    rows, columns = (-(-size // block) for size, block in zip(shape, how.block, strict=True))
    if how.packing is Packing.FP8_BLOCKS:
        return {name: shape, module + ".weight_scale_inv": (rows, columns)}
    return {
        module + ".weight_packed": (shape[0], -(-shape[1] // INT4_PER_WORD)),
        module + ".weight_scale": (rows, columns),
        module + ".weight_shape": (2,),
    }


def stored_dtypes(name: str, names: Container[str]) -> tuple[str, ...]:
    """What a tensor may be stored as, by safetensors' names; `names` are those of all tensors of the model."""
    if name.endswith(".weight_packed"):
        return ("I32",)
    if name.endswith(".weight_shape"):
        return ("I32", "I64")
    return ("F8_E4M3",) if name.removesuffix(".weight") + ".weight_scale_inv" in names else FLOATS


def _fp8(inner: Fields) -> Quantization:
    inner.choice("fmt", ("e4m3",), "e4m3")
    inner.choice("activation_scheme", ("dynamic",), "dynamic")
    block = inner.integers("weight_block_size", [])
    if len(block) != 2 or 0 in block:
        raise inner.error("weight_block_size", f"expected rows and columns of a block, found {block!r}")
    # whole parts of a module's name; lists of hundreds are common, so they are one expression
    names = "|".join(re.escape(name) for name in inner.strings("modules_to_not_convert"))
    skipped = (rf"(.*\.)?({names})(\..*)?$",) if names else ()
    return Quantization(Packing.FP8_BLOCKS, (block[0], block[1]), skipped)


def _int4(inner: Fields) -> Quantization:
    inner.choice("format", ("pack-quantized",), "")
    groups = list(inner.nested("config_groups").values)
    if len(groups) != 1:
        raise inner.error("config_groups", f"expected one group, found {groups!r}")
    group = inner.nested("config_groups").nested(groups[0])
    if group.strings("targets") != ["Linear"]:
        raise group.error("targets", f"expected ['Linear'], found {group.strings('targets')!r}")
    if group.values.get("input_activations"):
        raise group.error("input_activations", "quantized activations are not supported")
    weights = group.nested("weights")
    weights.choice("type", ("int",), "")
    weights.choice("strategy", ("group",), "")
    if weights.integer("num_bits") != 4 or not weights.boolean("symmetric", True):
        raise weights.error("num_bits", "only symmetric 4-bit weights are supported")
    # "weight" and "static" say in which order they were rounded; the columns lie as ever
    if weights.values.get("actorder") not in (None, False, "weight", "static"):
        raise weights.error("actorder", "columns in another order are not supported")
    patterns = [
        each.removeprefix("re:") if each.startswith("re:") else re.escape(each) + "$" for each in _ignore(inner)
    ]
    return Quantization(Packing.INT4_GROUPS, (1, weights.integer("group_size")), tuple(patterns))


def _ignore(inner: Fields) -> list[str]:
    names = inner.strings("ignore")
    for name in names:
        try:
            re.compile(name.removeprefix("re:"))
        except re.error as error:
            raise inner.error("ignore", f"{name!r} is no regular expression: {error}") from None
    return names


def _is_skipped(module: str, how: Quantization) -> bool:
    return bool(how.skipped) and _compiled(how.skipped).match(module) is not None


@cache
def _compiled(patterns: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(f"(?:{pattern})" for pattern in patterns))
