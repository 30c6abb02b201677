"""Every family gives the logits of transformers over 64 steps and more, whatever the chunks its text comes in."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from safetensors import safe_open

from tests.weft.tiny_families import FAMILIES, TinyFamily
from weft.kv.layer_groups import PagingPolicy
from weft.model import attention
from weft.model.config import expected_tensors
from weft.model.decoder import Decoder
from weft.model.kv_layout import block_bytes, group_heads, kv_groups
from weft.model.paged_pool import paged_pool
from weft.model.step import TokenBatch
from weft_kernels.paged_attention import KeySpan, PagedBatch, paged_attention

BLOCK_TOKENS = 8
NUM_TOKENS = 80
TOKENS = [(11 * i * i + 7 * i + 5) % 113 for i in range(NUM_TOKENS)]
NAN = float("nan")
TABLE = [7, 2, 5, 0, 9, 8, 1, 3, 6, 10]


def logits_in_chunks(
    tiny: TinyFamily, chunk: int, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> torch.Tensor:
    """[NUM_TOKENS, vocab]: all logits of one sequence, its blocks in no particular order, all others poisoned."""
    return decoder_logits(Decoder(tiny.config, tiny.weights, dtype, torch.device(device)), chunk)


def decoder_logits(model: Decoder, chunk: int) -> torch.Tensor:
    """See `logits_in_chunks`."""
    config, dtype, device = model.config, model.dtype, model.device
    groups = kv_groups(config)
    paging = PagingPolicy(groups.spans, BLOCK_TOKENS, chunk)
    # each group has pages of its own
    tables = [[12 * group + page for page in TABLE] for group in range(len(groups.spans))]
    pages = 12 * len(groups.spans)
    pool = torch.full((pages, block_bytes(config, "float32", BLOCK_TOKENS) // 4), NAN).to(device, dtype)
    caches = paged_pool(config, pool, BLOCK_TOKENS)
    logits = []
    with torch.inference_mode():
        heads = group_heads(config)
        for start in range(0, NUM_TOKENS, chunk):
            positions = torch.arange(start, min(start + chunk, NUM_TOKENS))
            end, count = int(positions[-1]) + 1, len(positions)
            slots = torch.tensor(tables)[:, positions // BLOCK_TOKENS] * BLOCK_TOKENS + positions % BLOCK_TOKENS
            batches = []
            for group, table in enumerate(tables):
                first = paging.first(group, start)
                pool[table[:first]] = NAN
                pool[table[-(-start // BLOCK_TOKENS) : -(-end // BLOCK_TOKENS)]] = 0
                left_out = paging.skipped_blocks(group, first)
                seen = [table[first]] * (first - left_out) + table[first:]
                batches.append(PagedBatch(caches, heads[group], [0, count], [end - left_out * BLOCK_TOKENS], [seen]))
            columns = torch.tensor(TOKENS[start:end]), positions, slots, torch.arange(count)
            rows = TokenBatch(*(each.to(device) for each in columns))
            logits.append(model.forward(rows, batches).cpu())
    return torch.cat(logits)


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_those_of_transformers(name: str, family_of: Callable[[str], TinyFamily]) -> None:
    tiny = family_of(name)
    expected = tiny.logits(TOKENS)
    for chunk in (1, 7, 16, NUM_TOKENS):
        torch.testing.assert_close(
            logits_in_chunks(tiny, chunk), expected, rtol=1e-4, atol=1e-4 * float(expected.std())
        )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", FAMILIES)
def test_logits_on_a_gpu_are_those_of_transformers(name: str, family_of: Callable[[str], TinyFamily]) -> None:
    """Rows one by one, few and many at a time: attention and experts have kernels or tiles of their own for each."""
    tiny = family_of(name)
    expected = tiny.logits(TOKENS)
    for chunk in (1, 7, NUM_TOKENS):
        torch.testing.assert_close(
            logits_in_chunks(tiny, chunk, device="cuda"), expected, rtol=1e-4, atol=1e-4 * float(expected.std())
        )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["llama3", "mistral-window", "qwen3-moe", "llama4", "deepseek"])
def test_logits_in_bf16_on_a_gpu_are_as_near_to_fp32(name: str, family_of: Callable[[str], TinyFamily]) -> None:
    """In all rows but a few: in some a router chooses other experts for a last bit, here as with transformers."""
    tiny = family_of(name)
    exact = tiny.logits(TOKENS)
    tiny.oracle.set_experts_implementation("eager")  # torch's grouped products take no rows as short as these
    rounded = replace(tiny, oracle=copy.deepcopy(tiny.oracle).to(torch.bfloat16))
    theirs = (rounded.logits(TOKENS).float() - exact).pow(2).mean(1).quantile(0.95)
    for chunk in (7, NUM_TOKENS):
        ours = (logits_in_chunks(tiny, chunk, torch.bfloat16, "cuda") - exact).pow(2).mean(1).quantile(0.95)
        assert ours < 1.5**2 * theirs


@pytest.mark.parametrize("name", ["llama3", "mistral-window", "qwen2-yarn", "qwen3", "llama4", "gpt-oss"])
def test_logits_in_bf16_are_as_near_to_fp32_as_those_of_transformers(
    name: str, family_of: Callable[[str], TinyFamily]
) -> None:
    tiny = family_of(name)
    exact = tiny.logits(TOKENS)
    rounded = replace(tiny, oracle=copy.deepcopy(tiny.oracle).to(torch.bfloat16))
    theirs = (rounded.logits(TOKENS).float() - exact).pow(2).mean().sqrt()
    ours = (logits_in_chunks(tiny, 16, torch.bfloat16) - exact).pow(2).mean().sqrt()
    assert ours < 1.5 * theirs


def test_in_bf16_a_long_texts_temperature_is_not_rounded(
    family_of: Callable[[str], TinyFamily], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Queries alone are, as by transformers: a rounded factor would shift all scores of a row alike."""
    queries: list[torch.Tensor] = []

    def attend(q: torch.Tensor, layer: int, batch: PagedBatch, span: KeySpan, *others: None) -> torch.Tensor:
        queries.append(q)
        return paged_attention(q, layer, batch, span, *others)

    monkeypatch.setattr(attention, "paged_attention", attend)
    tiny = family_of("llama4")
    for config in (tiny.config, replace(tiny.config, temperature=None)):
        logits_in_chunks(replace(tiny, config=config), NUM_TOKENS, torch.bfloat16)
    warm, plain = queries[3], queries[7]  # of the first layer that has a temperature, from the same hidden states
    factors = 1 + 0.4 * ((torch.arange(NUM_TOKENS) + 1.0) / 16).floor().log1p()
    assert torch.equal(warm, (plain.float() * factors[:, None, None]).bfloat16())


@pytest.mark.parametrize("name", FAMILIES)
def test_the_expected_tensors_are_those_that_transformers_saves(
    name: str, family_of: Callable[[str], TinyFamily]
) -> None:
    tiny = family_of(name)
    with safe_open(tiny.directory / "model.safetensors", "np") as file:
        saved = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    read = {name: shape for name, shape in saved.items() if not name.startswith(tiny.config.ignored)}
    assert expected_tensors(tiny.config) == read
