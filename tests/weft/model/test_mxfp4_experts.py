"""Experts in MXFP4, as gpt-oss is published, are what transformers unpacks on a CPU."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from transformers.utils.quantization_config import Mxfp4Config

from tests.weft.capacity.test_allocation import check_cpu
from tests.weft.capacity.test_plan import file_bytes, stored
from tests.weft.model.packers import pack_fp4
from tests.weft.model.test_families import NUM_TOKENS, TOKENS, logits_in_chunks
from tests.weft.model.test_quantized import Tensors, quantized
from tests.weft.tiny_families import TinyFamily, make_family
from weft.capacity.footprint import footprint
from weft.errors import BadCheckpoint
from weft.model.config import expected_tensors, read_config
from weft.model.loading import Loader
from weft.model.sharding import ShardSlice
from weft.model.unpacking import unpack_mxfp4
from weft.weights.checkpoint import read_checkpoint

CPU = torch.device("cpu")
FIELDS: dict[str, Any] = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}
SIZES = {"hidden_size": 64, "intermediate_size": 96}  # whole groups of 32
EXPERTS = "model.layers.1.mlp.experts."


def pack(name: str, weight: torch.Tensor, fields: dict[str, Any]) -> tuple[Tensors, torch.Tensor]:
    """Groups run along the inputs of each expert, which are the second dimension of the plain tensor."""
    rows = weight.mT.flatten(0, 1)
    parts, unpacked = pack_fp4(rows, {"format": "mxfp4"})
    groups = *weight.mT.shape[:2], -1
    blocks, scales = parts["weight_packed"].view(*groups, 16), parts["weight_scale"].view(groups)
    plain = unpacked.view(weight.mT.shape).mT.contiguous()
    assert torch.equal(convert_moe_packed_tensors(blocks, scales, dtype=torch.float32), plain)
    return {name + "_blocks": blocks.contiguous(), name + "_scales": scales.contiguous()}, plain


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> TinyFamily:
    return make_family("gpt-oss", tmp_path_factory.mktemp("plain"), **SIZES)


@pytest.fixture(scope="module")
def packed(plain: TinyFamily, tmp_path_factory: pytest.TempPathFactory) -> TinyFamily:
    return quantized(plain, FIELDS, tmp_path_factory.mktemp("packed") / "model", pack)


def test_every_byte_and_exponent_is_unpacked_as_by_transformers() -> None:
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).expand(1, 255, 16, 16)
    scales = torch.arange(255, dtype=torch.uint8).view(1, 255, 1).expand(1, 255, 16)
    expected = convert_moe_packed_tensors(blocks, scales)[0].mT
    assert torch.equal(unpack_mxfp4(blocks[0], scales[0]), expected)


def test_logits_are_those_that_transformers_computes_of_the_same_files(packed: TinyFamily) -> None:
    read_checkpoint(packed.directory)
    how = Mxfp4Config(dequantize=True)
    oracle: Any = transformers.GptOssForCausalLM.from_pretrained(
        packed.directory, quantization_config=how, dtype=torch.float32
    )
    oracle.eval()
    expected = replace(packed, oracle=oracle).logits(TOKENS)
    torch.testing.assert_close(expected, packed.logits(TOKENS))
    for chunk in (7, NUM_TOKENS):
        found = logits_in_chunks(packed, chunk)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4 * float(expected.std()))


def test_plan_counts_expanded_experts(plain: TinyFamily, packed: TinyFamily) -> None:
    assert stored(packed.config) == pytest.approx(file_bytes(packed.directory, packed.config))
    params = [sum(each.params for each in footprint(each.config).values()) for each in (plain, packed)]
    assert params[0] == params[1]
    held = [sum(each.size_bytes for each in footprint(each.config, "bfloat16").values()) for each in (plain, packed)]
    assert held[0] == held[1]
    check_cpu(packed)


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("part", ["gate_up_proj", "down_proj"])
def test_slices_are_those_of_the_plain_experts(part: str, dim: int, packed: TinyFamily) -> None:
    whole = torch.stack(list(loader_of(packed).expert_matrices(EXPERTS + part)))
    size = expected_tensors(replace(packed.config, quantization=None))[EXPERTS + part][dim]
    cut = ShardSlice(dim, ((0, 2), (size - 3, size)))
    found = torch.stack(list(loader_of(packed, {EXPERTS + part: cut}).expert_matrices(EXPERTS + part)))
    kept = [*range(2), *range(size - 3, size)]
    assert torch.equal(found.mT, whole.mT.index_select(dim, torch.tensor(kept)))


def loader_of(tiny: TinyFamily, slices: dict[str, ShardSlice] | None = None) -> Loader:
    weights = load_file(tiny.directory / "model.safetensors")
    return Loader(tiny.config, weights, torch.float32, CPU, slices=slices)


def test_experts_that_are_not_converted_stay_plain(plain: TinyFamily, tmp_path: Path) -> None:
    skipped = {**FIELDS, "modules_to_not_convert": ["model.layers.1.mlp.experts"]}
    tiny = quantized(plain, skipped, tmp_path / "model", pack)
    assert {EXPERTS + "down_proj", "model.layers.2.mlp.experts.down_proj_blocks"} < set(expected_tensors(tiny.config))
    expected = tiny.logits(TOKENS)
    torch.testing.assert_close(logits_in_chunks(tiny, 16), expected, rtol=1e-4, atol=1e-4 * float(expected.std()))


def test_mxfp4_of_other_models_is_refused(family_of: Callable[[str], TinyFamily], tmp_path: Path) -> None:
    fields = json.loads((family_of("qwen3-moe").directory / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(fields | {"quantization_config": FIELDS}))
    with pytest.raises(BadCheckpoint, match=r"quantization_config\.quant_method: mxfp4 is not supported in a Qwen3Moe"):
        read_config(tmp_path)
