"""Rotary frequencies and row orders are those of transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tests.weft.tiny_llama import Tiny
from weft.model.attention import inverse_frequencies, pairs_to_halves
from weft.model.config import Rope
from weft.model.fields import Fields, read_rope


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
