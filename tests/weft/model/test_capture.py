"""The captured residual stream is that of transformers, in families that build it in different ways."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.weft.tiny_families import TinyFamily
from weft.model.decoder import Decoder
from weft.model.kv_layout import block_bytes, group_heads, kv_groups
from weft.model.paged_pool import paged_pool
from weft.model.spec import FINAL
from weft.model.step import Capture, TokenBatch
from weft_kernels.paged_attention import PagedBatch

NUM_TOKENS = 24
TOKENS = [(11 * i * i + 7 * i + 5) % 113 for i in range(NUM_TOKENS)]


@pytest.mark.parametrize("name", ["llama2", "gemma3", "command-r", "granite", "deepseek"])
def test_captured_stream_is_that_of_transformers(name: str, family_of: Callable[[str], TinyFamily]) -> None:
    """With norms of outputs, parallel layers, a scaled residual and experts; only the last row's logits are wanted."""
    tiny = family_of(name)
    model, groups = Decoder(tiny.config, tiny.weights, torch.float32, torch.device("cpu")), kv_groups(tiny.config)
    num_layers, num_groups = tiny.config.num_layers, len(groups.spans)
    boundaries = (*range(num_layers), FINAL)
    captured = torch.empty(NUM_TOKENS, len(boundaries), tiny.config.hidden_size)
    pages = torch.zeros(num_groups, block_bytes(tiny.config, "float32", NUM_TOKENS) // 4)
    pool = paged_pool(tiny.config, pages, NUM_TOKENS)
    positions = torch.arange(NUM_TOKENS)
    slots = torch.arange(num_groups)[:, None] * NUM_TOKENS + positions
    rows = TokenBatch(torch.tensor(TOKENS), positions, slots, torch.tensor([NUM_TOKENS - 1]))
    batches = [
        PagedBatch(pool, heads, [0, NUM_TOKENS], [NUM_TOKENS], [[group]])
        for group, heads in enumerate(group_heads(tiny.config))
    ]
    with torch.inference_mode():
        hidden = model.hidden(rows, batches, Capture(boundaries, captured))
        plain = model.hidden(rows, batches)
        expected = tiny.oracle(torch.tensor([TOKENS]), output_hidden_states=True).hidden_states
    assert torch.equal(hidden, plain)
    for place, state in enumerate(expected):
        torch.testing.assert_close(captured[:, place], state[0], rtol=1e-4, atol=1e-4 * float(state.std()))
