"""The forward pass gives the logits of transformers, and refuses weights that are not what the config says."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path

import pytest
import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tests.weft.tiny_llama import Tiny
from weft.errors import BadCheckpoint
from weft.model.attention import inverse_frequencies, pairs_to_halves
from weft.model.common import read_rope
from weft.model.config import Rope
from weft.model.decoder import Decoder
from weft.model.fields import Fields
from weft.model.step import TokenBatch
from weft_kernels.paged_attention import PagedBatch

BLOCK_TOKENS = 8
CPU = torch.device("cpu")


def forward(tiny: Tiny, tokens: list[int], dtype: torch.dtype) -> torch.Tensor:
    """All logits of one sequence in one go, its blocks in no particular order."""
    config = tiny.config
    model = Decoder(config, tiny.weights, dtype, CPU)
    pool = torch.zeros(9, config.num_kv_heads, config.num_layers, 2, BLOCK_TOKENS, config.head_dim, dtype=dtype)
    table = [7, 2, 5, 0, 8, 1, 3, 6]
    positions = torch.arange(len(tokens))
    slots = torch.tensor(table)[positions // BLOCK_TOKENS] * BLOCK_TOKENS + positions % BLOCK_TOKENS
    batch = PagedBatch(pool, config.num_heads, [0, len(tokens)], [len(tokens)], [table])
    return model.forward(TokenBatch(torch.tensor(tokens), positions, slots[None], positions), [batch])


def test_logits_are_those_of_transformers_in_fp32(tiny: Tiny) -> None:
    tokens = [(7 * i) % 131 for i in range(60)]
    torch.testing.assert_close(forward(tiny, tokens, torch.float32), tiny.logits(tokens), rtol=1e-4, atol=1e-4)


def test_logits_in_bf16_are_as_near_to_fp32_as_those_of_transformers(tiny: Tiny) -> None:
    tokens = [(7 * i) % 131 for i in range(60)]
    exact = tiny.logits(tokens)
    rounded = dataclasses.replace(tiny, oracle=copy.deepcopy(tiny.oracle).to(torch.bfloat16))
    theirs = (rounded.logits(tokens).float() - exact).pow(2).mean().sqrt()
    ours = (forward(tiny, tokens, torch.bfloat16) - exact).pow(2).mean().sqrt()
    assert ours < 1.5 * theirs


def test_a_missing_tensor_is_named(grouped: Tiny) -> None:
    weights = grouped.weights
    del weights["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(BadCheckpoint, match=r"model\.layers\.1\.mlp\.up_proj\.weight is missing"):
        Decoder(grouped.config, weights, torch.float32, CPU)


def test_a_tensor_of_another_shape_is_named(grouped: Tiny) -> None:
    config = dataclasses.replace(grouped.config, intermediate_size=80)
    with pytest.raises(BadCheckpoint, match=r"gate_proj.* has shape \[96, 64\], expected \[80, 64\]"):
        Decoder(config, grouped.weights, torch.float32, CPU)


@pytest.mark.parametrize(
    "rope",
    [Rope(5e5, "linear", 4.0), Rope(5e5, "llama3", 8.0, 1.0, 4.0, 8192), Rope(1e4, "llama3", 32.0, 1.0, 4.0, 64)],
)
def test_frequencies_are_those_of_transformers(grouped: Tiny, rope: Rope) -> None:
    parameters = {
        "rope_theta": rope.theta,
        "rope_type": rope.kind,
        "factor": rope.factor,
        "low_freq_factor": rope.low_freq_factor,
        "high_freq_factor": rope.high_freq_factor,
        "original_max_position_embeddings": rope.original_max_positions,
    }
    config = type(grouped.oracle.config)(head_dim=128, max_position_embeddings=131072, rope_parameters=parameters)
    expected, _ = ROPE_INIT_FUNCTIONS[rope.kind](config)
    torch.testing.assert_close(inverse_frequencies(rope, 128), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    "fields",
    [
        {"factor": 4.0, "original_max_position_embeddings": 32768},
        {"factor": 40, "original_max_position_embeddings": 4096, "mscale": 1.0, "mscale_all_dim": 1.0},
        {"factor": 32, "original_max_position_embeddings": 4096, "mscale": 0.7, "mscale_all_dim": 1.3, "beta_fast": 1},
        {"factor": 16.0, "original_max_position_embeddings": 4096, "beta_slow": 2.5, "truncate": False},
        {"factor": 8.0, "original_max_position_embeddings": 64, "attention_factor": 1.25, "mscale": 2.0},
        {"factor": 8.0, "mscale_all_dim": 2.0},
    ],
)
def test_yarn_is_that_of_transformers(grouped: Tiny, fields: dict[str, float]) -> None:
    parameters = {"rope_theta": 50_000.0, "rope_type": "yarn", **fields}
    config = type(grouped.oracle.config)(head_dim=64, max_position_embeddings=131072, rope_parameters=dict(parameters))
    expected, factor = ROPE_INIT_FUNCTIONS["yarn"](config)
    values = {"rope_parameters": parameters, "max_position_embeddings": 131072}
    rope = read_rope(Fields(Path("config.json"), values))
    torch.testing.assert_close(inverse_frequencies(rope, 64), expected, rtol=1e-6, atol=0)
    assert rope.attention_factor == pytest.approx(factor)


def test_rows_of_pairs_become_rows_of_halves() -> None:
    assert pairs_to_halves(12, 6, 4).tolist() == [0, 1, 2, 4, 3, 5, 6, 7, 8, 10, 9, 11]
