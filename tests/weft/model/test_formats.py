"""Quantized formats of other tools: packed here from their documents, compared with transformers on what they mean."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.weft.capacity.test_plan import file_bytes, stored
from tests.weft.model.test_families import NUM_TOKENS, TOKENS, logits_in_chunks
from tests.weft.model.test_quantized import Tensors, quantized
from tests.weft.tiny_families import TinyFamily
from weft.capacity.footprint import footprint
from weft.errors import BadCheckpoint
from weft.model.config import config_of, expected_tensors, read_config
from weft.model.fields import Fields
from weft.model.loading import Loader, ShardSlice
from weft.model.quantization import is_packed
from weft.weights.checkpoint import read_checkpoint
from weft_kernels.packed import plain

Family = Callable[[str], TinyFamily]
CPU = torch.device("cpu")
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


def modelopt(algorithm: str, **more: Any) -> dict[str, Any]:
    ignore = ["lm_head", "model.layers.1.self_attn*"]
    return {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": ignore, **more}


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
    if fields["quant_method"] in ("fp8", "modelopt"):
        block, scale_shape = (rows, columns), ()
        if "weight_block_size" in fields:
            name, extra = "weight_scale_inv", "activation_scale"
    else:
        how, dtype = weights_of(fields), torch.bfloat16
        block = {"channel": (1, columns), "tensor": (rows, columns)}.get(how["strategy"]) or how["block_structure"]
        scale_shape = (1,) if how["strategy"] == "tensor" else None
    cells = weight.unflatten(0, (-1, block[0])).unflatten(2, (-1, block[1]))  # type: ignore[no-untyped-call]
    scale = (cells.abs().amax((1, 3)) / 440).to(dtype)
    wide = scale.float()[:, None, :, None]
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
    is_mx = fields.get("format", "").startswith("mx")
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
        return {"weight_packed": pairs, "weight_scale": scales}, unpacked
    if fields["quant_method"] == "modelopt":
        extra = {"weight_scale_2": whole, "input_scale": torch.tensor(1.0)}
        return {"weight": pairs, "weight_scale": scales, **extra}, unpacked
    extra = {"weight_global_scale": 1 / whole[None], "input_global_scale": torch.ones(1)}
    return {"weight_packed": pairs, "weight_scale": scales, **extra}, unpacked


def packer_of(fields: dict[str, Any]) -> Callable[..., tuple[Tensors, torch.Tensor]]:
    if fields["quant_method"] == "compressed-tensors":
        kind = weights_of(fields)["type"]
        return pack_ints if kind == "int" else pack_fp4 if weights_of(fields)["num_bits"] == 4 else pack_floats
    if fields["quant_method"] == "modelopt":
        return pack_fp4 if fields["quant_algo"] == "NVFP4" else pack_floats
    return {"fp8": pack_floats, "gptq": pack_gptq, "awq": pack_awq}[fields["quant_method"]]


def loader_of(tiny: TinyFamily, slices: dict[str, ShardSlice] | None = None) -> Loader:
    weights = load_file(tiny.directory / "model.safetensors")
    return Loader(tiny.config, weights, torch.float32, CPU, slices=slices)


def packed_modules(tiny: TinyFamily) -> list[str]:
    expected, how = expected_tensors(tiny.config), tiny.config.quantization
    modules = [name.removesuffix(".weight") for name in expected_tensors(replace(tiny.config, quantization=None))]
    return [module for module in modules if is_packed(module, expected, how)]


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("name", ["llama2", "qwen3"])
def test_format_gives_the_logits_of_its_weights(name: str, form: str, family_of: Family, tmp_path: Path) -> None:
    tiny = quantized(family_of(name), FORMATS[form], tmp_path / "packed", pack)
    assert packed_modules(tiny)
    expected = tiny.logits(TOKENS)
    assert not torch.allclose(expected, family_of(name).logits(TOKENS), rtol=1e-3)
    read_checkpoint(tiny.directory)
    found = logits_in_chunks(tiny, NUM_TOKENS)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4 * float(expected.std()))


@pytest.mark.parametrize("form", FORMATS)
def test_footprint_counts_the_bytes_of_a_format(form: str, family_of: Family, tmp_path: Path) -> None:
    plain_form = family_of("llama2")
    tiny = quantized(plain_form, FORMATS[form], tmp_path / "packed", pack)
    # factors of a file may be of another width
    assert stored(tiny.config) == pytest.approx(file_bytes(tiny.directory, tiny.config), rel=1e-3)
    params = [sum(each.params for each in footprint(config).values()) for config in (plain_form.config, tiny.config)]
    assert params[0] == params[1]
    loader, modules = loader_of(tiny), packed_modules(tiny)
    held = sum(loader.stored_weight(module).nbytes for module in modules)
    wide = {name for name in expected_tensors(tiny.config) if name.rpartition(".")[0] not in modules}
    held += sum(4 * tiny.weights[name].numel() for name in wide)
    assert held == sum(each.size_bytes for each in footprint(tiny.config, "float32").values())


@pytest.mark.parametrize("form", FORMATS)
def test_slices_of_a_format_are_those_of_its_weights(form: str, family_of: Family, tmp_path: Path) -> None:
    tiny = quantized(family_of("llama2"), FORMATS[form], tmp_path / "packed", pack)
    modules = packed_modules(tiny)
    whole = {module: plain(loader_of(tiny).stored_weight(module), torch.float32) for module in modules}
    for dim in (0, 1):
        parts = {
            module: ShardSlice(dim, ((0, 16), (matrix.shape[dim] - 32, matrix.shape[dim])))
            for module, matrix in whole.items()
        }
        loader = loader_of(tiny, {f"{module}.weight": part for module, part in parts.items()})
        for module, matrix in whole.items():
            expected = torch.cat([matrix.narrow(dim, 0, 16), matrix.narrow(dim, matrix.shape[dim] - 32, 32)], dim)
            torch.testing.assert_close(plain(loader.stored_weight(module), torch.float32), expected, atol=0, rtol=0)


@pytest.mark.parametrize("form", COMPRESSED)
def test_compressed_tensors_unpacks_the_same(form: str) -> None:
    """The library that defines these formats reads what is packed here, wherever it is installed."""
    compressors = pytest.importorskip("compressed_tensors.compressors")
    quantization = pytest.importorskip("compressed_tensors.quantization")
    fields = FORMATS[form]
    parts, expected = pack("", torch.randn(32, 64, generator=torch.Generator().manual_seed(1)), fields)
    scheme = quantization.QuantizationScheme(targets=["Linear"], weights=weights_of(fields))
    compressor = compressors.BaseCompressor.get_value_from_registry(fields["format"])
    found = compressor.decompress({name[1:]: tensor for name, tensor in parts.items()}, scheme)["weight"]
    torch.testing.assert_close(found.float(), expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("form", ["fp8-channel", "fp8-auto"])
def test_kv_scales_are_ignored_with_one_warning(
    form: str, family_of: Family, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    names = [f"model.layers.{layer}.self_attn.{part}_scale" for layer in range(3) for part in "kv"]
    scales = {name: torch.tensor(0.5) for name in names}
    fields = {**FORMATS[form], "kv_cache_scheme": {"num_bits": 8, "type": "float"}}
    tiny = quantized(family_of("llama2"), fields, tmp_path / "packed", pack, scales)
    with caplog.at_level(logging.WARNING):
        names = [source.entry.name for source in read_checkpoint(tiny.directory).tensors]
    assert not set(names) & set(scales)
    assert [record.message for record in caplog.records] == [
        f"KV scales ignored, the cache is not quantized directory={tiny.directory} tensors=6"
    ]
    expected = tiny.logits(TOKENS)
    weights = load_file(tiny.directory / "model.safetensors")
    assert set(scales) < set(weights)
    torch.testing.assert_close(logits_in_chunks(tiny, NUM_TOKENS), expected, rtol=1e-4, atol=1e-3)


def test_modelopt_is_read_from_the_file_beside_config(family_of: Family, tmp_path: Path) -> None:
    tiny = quantized(family_of("llama2"), FORMATS["modelopt-nvfp4"], tmp_path / "packed", pack)
    config = json.loads((tiny.directory / "config.json").read_text())
    del config["quantization_config"]
    (tiny.directory / "config.json").write_text(json.dumps(config))
    beside = {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16}
    beside["exclude_modules"] = FORMATS["modelopt-nvfp4"]["ignore"]
    (tiny.directory / "hf_quant_config.json").write_text(json.dumps({"quantization": beside}))
    assert read_config(tiny.directory) == tiny.config
    served = json.loads(read_checkpoint(tiny.directory).config_json)
    assert config_of(Fields(tiny.directory, served)).quantization == tiny.config.quantization


@pytest.mark.parametrize(
    ("form", "part", "words"),
    [
        ("gptq-asymmetric", {"sym": True}, "qzeros: holds other values than 8; set sym to false"),
        ("gptq-order", {"desc_act": False}, "g_idx: columns are not in the order of groups; set desc_act to true"),
    ],
)
def test_config_that_contradicts_tensors_is_refused(
    form: str, part: dict[str, Any], words: str, family_of: Family, tmp_path: Path
) -> None:
    tiny = quantized(family_of("llama2"), FORMATS[form], tmp_path / "packed", pack)
    quantized(family_of("llama2"), FORMATS[form] | part, tmp_path / "other", pack)
    tiny = replace(tiny, config=read_config(tmp_path / "other"))
    with pytest.raises(BadCheckpoint, match=words):
        loader_of(tiny).stored_weight("model.layers.0.mlp.up_proj")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (gptq(bits=3), "quantization_config.bits: 3 is not supported; supported: 4, 8; take"),
        (gptq(lm_head=True), "quantization_config.lm_head: a quantized head"),
        (gptq(dynamic={"+:.*": {"bits": 8}}), "quantization_config.dynamic: '+:.*'"),
        (floats("tensor") | {"transform_config": {"a": 1}}, "quantization_config.transform_config: is not supported"),
        (floats("channel", num_bits=4), "weights.num_bits: only symmetric FP8 and INT8"),
        (ints("pack-quantized", 3, "group"), "weights.num_bits: 3 is not supported; supported: 4, 8"),
        (ints("pack-quantized", 4, "group", actorder="x"), "weights.actorder: 'x' is not supported"),
        (fp4("nvfp4-pack-quantized", "tensor_group", 32), "weights.group_size: only 4 bits in groups of 16"),
        (modelopt("W4A8_AWQ"), "quantization_config.quant_algo: 'W4A8_AWQ' is not supported; supported: FP8, NVFP4"),
        (modelopt("NVFP4", group_size=32), "quantization_config.group_size: 32 is not supported"),
        (FORMATS["awq"] | {"bits": 3}, "quantization_config.bits: 3 is not supported"),
        (FORMATS["awq"] | {"version": "gemv"}, "quantization_config.version: 'gemv' is not supported"),
        (FORMATS["awq"] | {"zero_point": False}, "quantization_config.zero_point: false is not supported"),
        (floats("tensor_group"), "weights.strategy: 'tensor_group'"),
        (floats("block"), "weights.block_structure: expected"),
    ],
)
def test_unread_options_are_refused_by_field(
    fields: dict[str, Any], words: str, family_of: Family, tmp_path: Path
) -> None:
    with pytest.raises(BadCheckpoint) as caught:
        quantized(family_of("llama2"), fields, tmp_path / "packed", pack)
    assert str(tmp_path / "packed/config.json") in str(caught.value)
    assert words in str(caught.value)
