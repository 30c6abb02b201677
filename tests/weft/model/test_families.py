"""Every family gives the logits of transformers over 64 steps and more, whatever the chunks its text comes in."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from safetensors import safe_open

from tests.weft.tiny_families import FAMILIES, TinyFamily
from weft.model.config import expected_tensors
from weft.model.decoder import Decoder
from weft.model.step import Rows
from weft_kernels.paged_attention import PagedBatch

BLOCK_TOKENS = 8
NUM_TOKENS = 80
TOKENS = [(11 * i * i + 7 * i + 5) % 113 for i in range(NUM_TOKENS)]
TABLE = [7, 2, 5, 0, 9, 8, 1, 3, 6, 10]


def logits_in_chunks(tiny: TinyFamily, chunk: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """[NUM_TOKENS, vocab]: all logits of one sequence, its blocks in no particular order, the others poisoned."""
    config = tiny.config
    model = Decoder(config, tiny.weights, dtype, torch.device("cpu"))
    pool = torch.zeros(12, config.num_kv_heads, config.num_layers, config.kv_parts, BLOCK_TOKENS, config.head_dim)
    pool = pool.to(dtype)
    pool[[4, 11]] = float("nan")
    logits = []
    with torch.inference_mode():
        for start in range(0, NUM_TOKENS, chunk):
            positions = torch.arange(start, min(start + chunk, NUM_TOKENS))
            end, count = int(positions[-1]) + 1, len(positions)
            slots = torch.tensor(TABLE)[positions // BLOCK_TOKENS] * BLOCK_TOKENS + positions % BLOCK_TOKENS
            batch = PagedBatch(pool, config.num_heads, [0, count], [end], [TABLE])
            logits.append(
                model.forward(Rows(torch.tensor(TOKENS[start:end]), positions, slots, torch.arange(count)), batch)
            )
    return torch.cat(logits)


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_those_of_transformers(name: str, family_of: Callable[[str], TinyFamily]) -> None:
    tiny = family_of(name)
    expected = tiny.logits(TOKENS)
    for chunk in (1, 7, 16, NUM_TOKENS):
        torch.testing.assert_close(
            logits_in_chunks(tiny, chunk), expected, rtol=1e-4, atol=1e-4 * float(expected.std())
        )


@pytest.mark.parametrize("name", ["llama3", "mistral-window", "qwen2-yarn", "qwen3", "llama4"])
def test_logits_in_bf16_are_as_near_to_fp32_as_those_of_transformers(
    name: str, family_of: Callable[[str], TinyFamily]
) -> None:
    tiny = family_of(name)
    exact = tiny.logits(TOKENS)
    rounded = replace(tiny, oracle=copy.deepcopy(tiny.oracle).to(torch.bfloat16))
    theirs = (rounded.logits(TOKENS).float() - exact).pow(2).mean().sqrt()
    ours = (logits_in_chunks(tiny, 16, torch.bfloat16) - exact).pow(2).mean().sqrt()
    assert ours < 1.5 * theirs


@pytest.mark.parametrize("name", FAMILIES)
def test_the_expected_tensors_are_those_that_transformers_saves(
    name: str, family_of: Callable[[str], TinyFamily]
) -> None:
    tiny = family_of(name)
    with safe_open(tiny.directory / "model.safetensors", "np") as file:
        saved = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    assert expected_tensors(tiny.config) == saved
