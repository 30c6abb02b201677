"""Packed weights count as what they stand for, and wrapped models as the text model inside."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.weft.model.test_families import NUM_TOKENS, TOKENS, logits_in_chunks
from tests.weft.tiny_families import TinyFamily, wrap
from weft.errors import BadCheckpoint
from weft.model.config import expected_tensors, read_config
from weft.model.decoder import Decoder
from weft.model.quantization import is_packed
from weft.weights.checkpoint import read_checkpoint

Tensors = dict[str, torch.Tensor]
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [16, 12]}
# as Kimi K2.5 has it, in smaller groups
INT4: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "input_activations": None,
            "output_activations": None,
            "weights": {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 4},
        }
    },
    "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*"],
}
Family = Callable[[str], TinyFamily]
Pack = Callable[[str, torch.Tensor, dict[str, Any]], tuple[Tensors, torch.Tensor]]


def pack_fp8(name: str, weight: torch.Tensor) -> Tensors:
    """Blocks of 16 x 12, each with the factor that brings its largest value to the type's largest."""
    scale = torch.empty(-(-weight.shape[0] // 16), -(-weight.shape[1] // 12))
    packed = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    for row in range(scale.shape[0]):
        for column in range(scale.shape[1]):
            block = slice(16 * row, 16 * row + 16), slice(12 * column, 12 * column + 12)
            scale[row, column] = weight[block].abs().max() / 448
            packed[block] = (weight[block] / scale[row, column]).to(torch.float8_e4m3fn)
    return {name + ".weight": packed, name + ".weight_scale_inv": scale}


def pack_int4(name: str, weight: torch.Tensor) -> Tensors:
    """Groups of 4 columns; -7 .. 7 as 1 .. 15, the first value in the lowest bits."""
    scale = weight.unflatten(1, (-1, 4)).abs().amax(-1) / 7  # type: ignore[no-untyped-call]
    values = (weight / scale.repeat_interleave(4, 1)).round().clamp(-8, 7).to(torch.int64) + 8
    values = torch.nn.functional.pad(values, (0, -values.shape[1] % 8))
    words = torch.stack([values[:, each::8] << (4 * each) for each in range(8)]).sum(0)
    packed = torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
    return {
        name + ".weight_packed": packed,
        name + ".weight_scale": scale.to(torch.bfloat16),
        name + ".weight_shape": torch.tensor(weight.shape),
    }


def unpack_fp8(packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Every block of 16 rows and 12 columns times its own factor."""
    rows = scale.repeat_interleave(16, 0)[: packed.shape[0]]
    return packed.float() * rows.repeat_interleave(12, 1)[:, : packed.shape[1]]


def unpack_int4(packed: torch.Tensor, scale: torch.Tensor, columns: int) -> torch.Tensor:
    """The first value in the lowest bits, 8 for 0."""
    values = torch.stack([(packed >> shift) & 15 for shift in range(0, 32, 4)], 2).flatten(1)[:, :columns] - 8
    return values * scale.repeat_interleave(4, 1)[:, :columns]


def pack_and_unpack(name: str, weight: torch.Tensor, fields: dict[str, Any]) -> tuple[Tensors, torch.Tensor]:
    """Return a module's tensors, and the weight that they stand for."""
    if fields["quant_method"] == "fp8":
        packed = pack_fp8(name, weight)
        return packed, unpack_fp8(packed[name + ".weight"], packed[name + ".weight_scale_inv"])
    packed = pack_int4(name, weight)
    scale = packed[name + ".weight_scale"].float()
    return packed, unpack_int4(packed[name + ".weight_packed"], scale, weight.shape[1])


def quantized(
    tiny: TinyFamily,
    fields: dict[str, Any],
    directory: Path,
    pack: Pack = pack_and_unpack,
    extra: Tensors | None = None,
) -> TinyFamily:
    """The checkpoint packed as its config says; the oracle gets the weights that this stands for."""
    config = json.loads((tiny.directory / "config.json").read_text()) | {"quantization_config": fields}
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    read = read_config(directory)
    expected = expected_tensors(read)
    tensors, oracle = dict(extra or {}), dict(tiny.weights)
    for name, weight in tiny.weights.items():
        module = name.removesuffix(".weight")
        if is_packed(module, expected, read.quantization):
            packed, oracle[name] = pack(module, weight, fields)
            # E2M1 has no 5: 4 and 6 are a fifth of it away
            assert (oracle[name] - weight).abs().max() < 0.201 * weight.abs().max(), "packing and unpacking disagree"
            tensors |= packed
        else:
            tensors[name] = weight
    save_file(tensors, directory / "model.safetensors")
    plain = directory / "plain"
    plain.mkdir()
    (plain / "config.json").write_text((tiny.directory / "config.json").read_text())
    save_file(oracle, plain / "model.safetensors", {"format": "pt"})
    model = type(tiny.oracle).from_pretrained(plain)
    model.eval()
    return replace(tiny, oracle=model, directory=directory, config=read_config(directory))


@pytest.mark.parametrize(
    ("name", "fields"), [("deepseek", FP8), ("kimi-k2", INT4), ("llama2", FP8), ("qwen3-moe", FP8)]
)
def test_packed_checkpoints_give_the_logits_of_what_they_stand_for(
    name: str, fields: dict[str, Any], family_of: Family, tmp_path: Path
) -> None:
    tiny = quantized(family_of(name), fields, tmp_path / "packed")
    assert len(expected_tensors(tiny.config)) > len(expected_tensors(family_of(name).config))
    assert {source.entry.name for source in read_checkpoint(tiny.directory).tensors} == set(tiny.weights)
    expected = tiny.logits(TOKENS)
    assert not torch.allclose(expected, family_of(name).logits(TOKENS), rtol=1e-2)
    for chunk in (7, NUM_TOKENS):
        torch.testing.assert_close(
            logits_in_chunks(tiny, chunk), expected, rtol=1e-4, atol=1e-4 * float(expected.std())
        )


@pytest.mark.parametrize("name", ["llama2", "qwen3-moe"])
def test_packed_weights_lose_nothing_beside_bfloat16_ones(name: str, family_of: Family, tmp_path: Path) -> None:
    """Queries are packed and keys are not, gates are and what they multiply is not: of what is one matrix here."""
    fields = FP8 | {"modules_to_not_convert": ["k_proj", "up_proj"]}
    tiny = quantized(family_of(name), fields, tmp_path / "packed")
    plain = ("k_proj.weight", "up_proj.weight")
    halves = {name: each.bfloat16() if name.endswith(plain) else each for name, each in tiny.weights.items()}
    wide = {name: each.float() if name.endswith(plain) else each for name, each in halves.items()}
    found = []
    for weights in (halves, wide):
        save_file(weights, tiny.directory / "model.safetensors")
        found.append(logits_in_chunks(tiny, NUM_TOKENS))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4 * float(found[1].std()))


@pytest.mark.parametrize(
    ("name", "architecture"),
    [
        ("llama4", "Llama4ForConditionalGeneration"),
        ("kimi-k2", "KimiK25ForConditionalGeneration"),
        ("gemma3", "Gemma3ForConditionalGeneration"),
        ("mistral", "Mistral3ForConditionalGeneration"),
        ("ministral3", "Mistral3ForConditionalGeneration"),
        ("mistral4", "Mistral3ForConditionalGeneration"),
    ],
)
def test_the_text_model_of_a_wrapped_one_is_served(
    name: str, architecture: str, family_of: Family, tmp_path: Path
) -> None:
    tiny = wrap(family_of(name), architecture, tmp_path / "wrapped")
    assert tiny.config.architecture == architecture
    assert tiny.config.eos_token_ids == (2,)
    expected = tiny.logits(TOKENS)
    torch.testing.assert_close(logits_in_chunks(tiny, 16), expected, rtol=1e-4, atol=1e-4 * float(expected.std()))
    names = {source.entry.name for source in read_checkpoint(tiny.directory).tensors}
    assert names == {name for name in tiny.weights if name.startswith("language_model.")}


def test_fp8_leaves_the_named_modules_alone(family_of: Family, tmp_path: Path) -> None:
    names = ["lm_head", "model.layers.0.self_attn", "model.layers.1.mlp.down_proj", "up_proj", "layers.2.mlp.gate"]
    config = json.loads((family_of("llama2").directory / "config.json").read_text())
    config["quantization_config"] = FP8 | {"modules_to_not_convert": names}
    (tmp_path / "config.json").write_text(json.dumps(config))
    packed = {each for each in expected_tensors(read_config(tmp_path)) if each.endswith("_scale_inv")}
    attention = {f"model.layers.{i}.self_attn.{part}_proj" for i in (1, 2) for part in "qkvo"}
    mlp = {f"model.layers.{i}.mlp.{part}_proj" for i in range(3) for part in ("gate", "down")}
    mlp.remove("model.layers.1.mlp.down_proj")
    assert packed == {name + ".weight_scale_inv" for name in attention | mlp}


def test_fp8_modules_have_the_names_of_the_checkpoint(family_of: Family, tmp_path: Path) -> None:
    tiny = family_of("ling2")
    config = json.loads((tiny.directory / "config.json").read_text())
    config["quantization_config"] = FP8 | {"modules_to_not_convert": ["attention.dense"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    read, plain = read_config(tmp_path), tiny.weights
    weights: Tensors = {}
    for name in expected_tensors(read):
        module = name.removesuffix(".weight_scale_inv")
        weights |= pack_fp8(module, plain[module + ".weight"]) if module != name else {}
    assert not [name for name in weights if "dense" in name or "q_proj" in name]
    unpacked = dict(plain)
    for name in [name for name in weights if name.endswith(".weight")]:
        unpacked[name] = unpack_fp8(weights[name], weights[name + "_scale_inv"])
    found = []
    for config, tensors in ((read, plain | weights), (tiny.config, unpacked)):
        save_file(tensors, tmp_path / "model.safetensors")
        found.append(logits_in_chunks(replace(tiny, config=config, directory=tmp_path), NUM_TOKENS))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4 * float(found[1].std()))


def test_layers_that_predict_further_tokens_are_left_aside(family_of: Family) -> None:
    tiny = family_of("deepseek")
    config = replace(tiny.config, ignored=("model.layers.3.",))
    extra = {"model.layers.3.eh_proj.weight": torch.ones(2, 2)}
    Decoder(config, tiny.weights | extra, torch.float32, torch.device("cpu"))
    with pytest.raises(
        BadCheckpoint, match=r"model\.layers\.3\.eh_proj\.weight is not part of a DeepseekV3ForCausalLM"
    ):
        Decoder(tiny.config, tiny.weights | extra, torch.float32, torch.device("cpu"))


def test_packed_bytes_are_not_taken_for_weights(family_of: Family) -> None:
    tiny = family_of("llama2")
    name = "model.layers.0.mlp.up_proj.weight"
    packed = tiny.weights | {name: tiny.weights[name].to(torch.float8_e4m3fn)}
    with pytest.raises(BadCheckpoint, match=r"layers\.0\.mlp\.up_proj\.weight has dtype torch\.float8_e4m3fn"):
        Decoder(tiny.config, packed, torch.float32, torch.device("cpu"))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"quant_method": "hqq"}, "quantization_config.quant_method: 'hqq' is not supported; supported: fp8"),
        ({"format": "marlin-24"}, "quantization_config.format: 'marlin-24'"),
        ({"format": "float-quantized"}, "quantization_config.config_groups.group_0.weights.num_bits: only"),
        ({"config_groups": {}}, "quantization_config.config_groups"),
        ({"ignore": ["re:("]}, "quantization_config.ignore"),
        ({"quant_method": "fp8", "weight_block_size": [16]}, "quantization_config.weight_block_size"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "quantization_config.fmt"),
        ({"quant_method": "fp8", "activation_scheme": "tensor"}, "quantization_config.activation_scheme"),
    ],
)
def test_packings_that_cannot_be_read_are_refused_by_field(
    change: dict[str, Any], words: str, family_of: Family, tmp_path: Path
) -> None:
    config = json.loads((family_of("llama2").directory / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": INT4 | change}))
    with pytest.raises(BadCheckpoint) as caught:
        read_config(tmp_path)
    assert str(tmp_path / "config.json") in str(caught.value)
    assert words in str(caught.value)
