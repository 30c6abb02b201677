"""Two ranks that load half of each tensor compute together what one rank computes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.weft.model.test_quantized import pack_fp8, pack_int4
from weft.errors import BadCheckpoint
from weft.model.decoder import Mlp
from weft.model.loading import Loader
from weft.model.sharding import ShardSlice
from weft.model.spec import LayerSpec, ModelConfig, Packing, Quantization, Rope
from weft.model.tensors import expected_tensors
from weft_kernels.linear import linear

CPU = torch.device("cpu")
ROOT = "model.layers.0."
CONFIG = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=32,
    hidden_size=48,
    intermediate_size=96,
    layers=(LayerSpec(),),
    num_heads=4,
    num_kv_heads=2,
    head_dim=48,
    rms_norm_eps=1e-6,
    rope=Rope(10_000.0),
    max_positions=64,
    is_tied=False,
    eos_token_ids=(),
    dtype="float32",
    has_qkv_bias=True,
)
FP8 = Quantization(Packing.FP8_BLOCKS, (16, 12))
INT4 = Quantization(Packing.INT4_GROUPS, (1, 4))
FORMATS = {"float32": None, "bfloat16": None, "packed12": None, "fp8": FP8, "int4": INT4}


def half(size: int, rank: int, dim: int) -> ShardSlice:
    return ShardSlice(dim, ((size // 2 * rank, size // 2 * (rank + 1)),))


def slices_of(rank: int) -> dict[str, ShardSlice]:
    """Rows of q, k, v, gate, up and the vocabulary; columns of o and down."""
    slices = {}
    for name, shape in expected_tensors(CONFIG).items():
        part = name.removesuffix(".weight").rsplit(".", 1)[-1]
        if part in ("o_proj", "down_proj"):
            slices[name] = half(shape[1], rank, 1)
        elif "norm" not in name:
            slices[name] = half(shape[0], rank, 0)
    return slices


def loader_of(form: str, slices: dict[str, ShardSlice] | None = None) -> Loader:
    generator = torch.Generator().manual_seed(5)
    dtype = torch.bfloat16 if form in ("bfloat16", "packed12") else torch.float32
    weights: dict[str, torch.Tensor] = {}
    for name, shape in expected_tensors(CONFIG).items():
        weight = torch.randn(shape, generator=generator)
        if form in ("fp8", "int4") and name.endswith("_proj.weight"):
            weights |= (pack_fp8 if form == "fp8" else pack_int4)(name.removesuffix(".weight"), weight)
        else:
            weights[name] = weight.to(dtype)
    return Loader(replace(CONFIG, quantization=FORMATS[form]), weights, dtype, CPU, form == "packed12", slices)


def assert_alike(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal but for rounding: bfloat16 sums of two halves round once more than the sum of the whole."""
    largest = float(expected.float().abs().max())
    tolerance = (2e-2 if expected.dtype == torch.bfloat16 else 1e-5) * largest
    torch.testing.assert_close(found.float(), expected.float(), atol=tolerance, rtol=0)


@pytest.mark.parametrize("form", FORMATS)
def test_two_half_shards_compute_what_the_whole_does(form: str) -> None:
    whole, halves = loader_of(form), [loader_of(form, slices_of(rank)) for rank in range(2)]
    x = torch.randn(3, CONFIG.hidden_size, generator=torch.Generator().manual_seed(6)).to(whole.dtype)
    names = [f"{ROOT}self_attn.{part}_proj" for part in "qkv"]
    bias = torch.cat([whole.tensor(name + ".bias") for name in names])
    sizes = [192, 96, 96]  # rows of q, k, v
    expected = torch.split(linear(x, whole.linear(*names), bias), sizes, -1)
    found = []
    for each in halves:
        bias = torch.cat([each.tensor(name + ".bias") for name in names])
        found.append(torch.split(linear(x, each.linear(*names), bias), [size // 2 for size in sizes], -1))
    for part in range(3):
        assert_alike(torch.cat([each[part] for each in found], -1), expected[part])

    attended, name = expected[0], f"{ROOT}self_attn.o_proj"
    parts = zip(attended.chunk(2, -1), halves, strict=True)
    output = [linear(part.contiguous(), each.linear(name)) for part, each in parts]
    assert_alike(output[0] + output[1], linear(attended, whole.linear(name)))

    mlps = [Mlp(ROOT + "mlp.", each).forward(x) for each in halves]
    assert_alike(mlps[0] + mlps[1], Mlp(ROOT + "mlp.", whole).forward(x))

    rows = torch.cat([each.matrix("model.embed_tokens.weight") for each in halves])
    torch.testing.assert_close(rows, whole.matrix("model.embed_tokens.weight"), atol=0, rtol=0)


def test_fused_tensors_are_cut_in_both_halves() -> None:
    name = ROOT + "mlp.gate_proj.weight"
    whole = loader_of("float32").tensor(name)
    part = loader_of("float32", {name: ShardSlice(0, ((0, 8), (48, 56)))}).tensor(name)
    torch.testing.assert_close(part, torch.cat((whole[:8], whole[48:56])), atol=0, rtol=0)


@pytest.mark.parametrize(
    ("form", "part", "message"),
    [
        ("fp8", ShardSlice(0, ((0, 40),)), r"weight_scale_inv: \[0, 40\) of dimension 0 cuts a block of 16; choose"),
        ("fp8", ShardSlice(1, ((20, 48),)), r"\[20, 48\) of dimension 1 cuts a block of 12"),
        ("int4", ShardSlice(1, ((0, 12),)), r"weight_packed: \[0, 12\) of dimension 1 cuts a block of 8"),
    ],
)
def test_cuts_inside_a_block_are_refused(form: str, part: ShardSlice, message: str) -> None:
    loader = loader_of(form, {ROOT + "mlp.gate_proj.weight": part})
    with pytest.raises(BadCheckpoint, match=message):
        loader.linear(ROOT + "mlp.gate_proj")


def test_an_odd_last_block_may_be_cut_off() -> None:
    assert ShardSlice(0, ((16, 40),)).in_blocks("w", 16, 40) == ShardSlice(0, ((1, 3),))


@pytest.mark.parametrize(
    ("name", "part", "message"),
    [
        ("mlp.weight", ShardSlice(0, ((0, 1),)), "has no such tensor"),
        (ROOT + "mlp.up_proj.weight", ShardSlice(0, ((90, 97),)), r"\[90, 97\) is not inside dimension 0"),
        (ROOT + "mlp.up_proj.weight", ShardSlice(2, ((0, 1),)), "dimension 2"),
    ],
)
def test_slices_outside_the_model_are_refused(name: str, part: ShardSlice, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        loader_of("int4", {name: part})
