"""Formats against the libraries that define them: what Weft makes of a weight is what the library makes of it."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.weft.model.packers import COMPRESSED, FORMATS, GROUP, Tensors, bitsandbytes, ints, pack, weights_of
from tests.weft.model.test_formats import loader_of, packed_modules
from tests.weft.model.test_quantized import pack_fp8, quantized, unpack_fp8
from tests.weft.tiny_families import TinyFamily

Family = Callable[[str], TinyFamily]


@pytest.mark.parametrize("form", COMPRESSED)
def test_weights_are_those_of_compressed_tensors(form: str) -> None:
    fields = FORMATS[form]
    parts, expected = pack("", random_weight(), fields)
    found = decompressed({name[1:]: tensor for name, tensor in parts.items()}, fields["format"], weights_of(fields))
    torch.testing.assert_close(found.float(), expected, rtol=1e-2, atol=1e-2)


def test_awq_weights_are_those_of_compressed_tensors() -> None:
    """Its converter of AutoAWQ's checkpoints makes words of its own format of them."""
    converters = importlib.import_module("compressed_tensors.entrypoints.convert.converters")
    parts, expected = pack("m", random_weight(), FORMATS["awq"])
    converted = converters.AutoAWQConverter(group_size=GROUP).process(parts)
    weights = weights_of(ints("pack-quantized", 4, "group", symmetric=False))
    found = decompressed({name[2:]: tensor for name, tensor in converted.items()}, "pack-quantized", weights)
    torch.testing.assert_close(found.float(), expected, rtol=1e-3, atol=1e-3)


def test_modelopt_weights_are_those_of_compressed_tensors() -> None:
    """Its converter of ModelOpt's NVFP4 checkpoints renames and inverts the factors."""
    converters = importlib.import_module("compressed_tensors.entrypoints.convert.converters")
    parts, expected = pack("m", random_weight(), FORMATS["modelopt-nvfp4"])
    converted = converters.ModelOptNvfp4Converter(targets=["m"]).process(parts)
    fields = FORMATS["nvfp4"]
    tensors = {name[2:]: tensor for name, tensor in converted.items()}
    found = decompressed(tensors, fields["format"], weights_of(fields))
    torch.testing.assert_close(found.float(), expected, rtol=1e-2, atol=1e-2)


def test_fp8_blocks_are_those_of_compressed_tensors() -> None:
    converters = importlib.import_module("compressed_tensors.entrypoints.convert.converters")
    weight = random_weight()
    parts = pack_fp8("m", weight)
    dequantizer = converters.FP8BlockDequantizer(targets=["m"], weight_block_size=(16, 12), dtype=torch.float32)
    expected = unpack_fp8(parts["m.weight"], parts["m.weight_scale_inv"])
    torch.testing.assert_close(dequantizer.process(parts)["m.weight"], expected)


def random_weight() -> torch.Tensor:
    return torch.randn(32, 64, generator=torch.Generator().manual_seed(1))


def decompressed(parts: Tensors, kind: str, weights: dict[str, Any]) -> torch.Tensor:
    compressors = importlib.import_module("compressed_tensors.compressors")
    quantization = importlib.import_module("compressed_tensors.quantization")
    scheme = quantization.QuantizationScheme(targets=["Linear"], weights=weights)
    weight: torch.Tensor = compressors.BaseCompressor.get_value_from_registry(kind).decompress(parts, scheme)["weight"]
    return weight


def pack_by_bitsandbytes(module: str, weight: torch.Tensor, fields: dict[str, Any]) -> tuple[Tensors, torch.Tensor]:
    """Let the library quantize and describe a weight, and dequantize it as rows of one block each.

    Its CPU kernel reads wrong factors where a block of the flat matrix crosses rows, as in one of 96 columns; on a
    GPU, and in its own reference in Python, blocks are those of the flat matrix.
    """
    functional = importlib.import_module("bitsandbytes.functional")
    kind, is_nested = fields["bnb_4bit_quant_type"], fields["bnb_4bit_use_double_quant"]
    packed, state = functional.quantize_4bit(weight, blocksize=64, quant_type=kind, compress_statistics=is_nested)
    parts = {"weight": packed, **{f"weight.{name}": part for name, part in state.as_dict(packed=True).items()}}
    state.shape = torch.Size([weight.numel() // 64, 64])
    unpacked = functional.dequantize_4bit(packed, state).view(weight.shape)
    return {f"{module}.{part}": tensor for part, tensor in parts.items()}, unpacked


@pytest.mark.parametrize("form", ["nf4", "nf4-nested", "fp4", "fp4-nested"])
def test_weights_are_those_of_bitsandbytes(form: str, family_of: Family, tmp_path: Path) -> None:
    """The library writes the checkpoint; the oracle computes with the weights that it dequantizes."""
    kind, _, nested = form.partition("-")
    fields = bitsandbytes(kind, bool(nested))
    tiny = quantized(family_of("llama2"), fields, tmp_path / "packed", pack_by_bitsandbytes)
    loader = loader_of(tiny)
    oracle = dict(tiny.oracle.named_parameters())
    for module in packed_modules(tiny):
        torch.testing.assert_close(loader.stored_weight(module), oracle[f"{module}.weight"], rtol=1e-6, atol=1e-7)
