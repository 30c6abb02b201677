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
from safetensors.torch import load_file, save_file

from tests.weft.capacity.test_plan import file_bytes, stored
from tests.weft.model.packers import FORMATS, bitsandbytes, floats, fp4, gptq, ints, modelopt, pack, quark
from tests.weft.model.test_families import NUM_TOKENS, TOKENS, logits_in_chunks
from tests.weft.model.test_quantized import quantized
from tests.weft.tiny_families import TinyFamily
from weft.capacity.footprint import footprint
from weft.errors import BadCheckpoint
from weft.model.config import config_of, expected_tensors, read_config
from weft.model.fields import Fields
from weft.model.loading import Loader
from weft.model.quantization import is_packed
from weft.model.sharding import ShardSlice
from weft.weights.checkpoint import read_checkpoint
from weft_kernels.packed import plain

Family = Callable[[str], TinyFamily]
CPU = torch.device("cpu")


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
    packed = tuple(f"{module}." for module in modules)
    wide = {name for name in expected_tensors(tiny.config) if not name.startswith(packed)}
    held += sum(4 * tiny.weights[name].numel() for name in wide)
    assert held == sum(each.size_bytes for each in footprint(tiny.config, "float32").values())


@pytest.mark.parametrize("form", FORMATS)
def test_slices_of_a_format_are_those_of_its_weights(form: str, family_of: Family, tmp_path: Path) -> None:
    tiny = quantized(family_of("llama2"), FORMATS[form], tmp_path / "packed", pack)
    modules = packed_modules(tiny)
    whole = {module: plain(loader_of(tiny).stored_weight(module), torch.float32) for module in modules}
    first = 32 if form == "mxfp8" else 16  # a cut at whole groups
    for dim in (0, 1):
        parts = {
            module: ShardSlice(dim, ((0, first), (matrix.shape[dim] - 32, matrix.shape[dim])))
            for module, matrix in whole.items()
        }
        loader = loader_of(tiny, {f"{module}.weight": part for module, part in parts.items()})
        for module, matrix in whole.items():
            expected = torch.cat([matrix.narrow(dim, 0, first), matrix.narrow(dim, matrix.shape[dim] - 32, 32)], dim)
            torch.testing.assert_close(plain(loader.stored_weight(module), torch.float32), expected, atol=0, rtol=0)


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


def test_quantized_head_is_named(family_of: Family, tmp_path: Path) -> None:
    extra = {"lm_head.weight_packed": torch.zeros(2, 2, dtype=torch.int32)}
    tiny = quantized(family_of("llama2"), FORMATS["int4-channel"], tmp_path / "packed", pack, extra)
    weights = load_file(tiny.directory / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, tiny.directory / "model.safetensors")
    with pytest.raises(BadCheckpoint, match=r"lm_head\.weight is missing: there is lm_head\.weight_packed; .* take a"):
        read_checkpoint(tiny.directory)


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (b"{", "expected JSON of bitsandbytes"),
        (b'{"shape": [64, 96], "blocksize": 64}', "found shape and blocks"),
        (b'{"shape": [96, 64], "blocksize": 128}', "found shape and blocks"),
        (b'{"shape": [96, 64], "blocksize": 64, "nested_offset": NaN}', "offset nan"),
    ],
)
def test_description_of_another_weight_is_refused(said: bytes, words: str, family_of: Family, tmp_path: Path) -> None:
    tiny = quantized(family_of("llama2"), FORMATS["nf4"], tmp_path / "packed", pack)
    name = "model.layers.0.mlp.up_proj.weight.quant_state.bitsandbytes__nf4"
    changed = load_file(tiny.directory / "model.safetensors") | {name: torch.tensor(list(said), dtype=torch.uint8)}
    loader = Loader(tiny.config, changed, torch.float32, CPU)
    with pytest.raises(BadCheckpoint, match=words) as caught:
        loader.stored_weight("model.layers.0.mlp.up_proj")
    assert f"tensor {name}: " in str(caught.value)


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
        (bitsandbytes("nf4", True) | {"load_in_8bit": True}, "load_in_8bit: only 4 bits (load_in_4bit) are supported"),
        (bitsandbytes("nf5", True), "bnb_4bit_quant_type: 'nf5' is not supported; supported: nf4, fp4"),
        (bitsandbytes("nf4", True) | {"bnb_4bit_quant_storage": "bfloat16"}, "quant_storage: 'bfloat16' is not"),
        (quark("int4", "per_group"), "global_quant_config.weight.dtype: 'int4' is not supported; supported: fp8_e4m3"),
        (quark("fp4", "per_group", group_size=16, scale_format="e8m0"), "weight.group_size: 16 is not supported"),
        (
            quark("fp8_e4m3", "per_tensor") | {"layer_quant_config": {"*o_proj": {"weight": {"dtype": "int8"}}}},
            "quantization_config.layer_quant_config: '*o_proj' has weights of its own",
        ),
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
