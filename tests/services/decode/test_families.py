"""Families whose cache is shaped otherwise are handed off from prefill to decode workers like a Llama."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.services.workers import start_pair
from tests.weft.tiny_families import make_family

LENGTHS = (1, 7, 24, 45)


@pytest.mark.parametrize("transport", ["grpc", "mooncake"])
@pytest.mark.parametrize("name", ["mistral-window", "qwen3-moe", "llama4", "deepseek"])
async def test_tokens_after_a_hand_off_are_those_of_transformers(name: str, transport: str, tmp_path: Path) -> None:
    tiny = make_family(name, tmp_path)
    async with start_pair(tiny, transport) as pair:
        for length in LENGTHS:
            token_ids = tuple((5 * i * i + 3 * i + 7 * length) % 110 + 3 for i in range(length))
            answer = await pair.gateway.generate(token_ids, pair.prefill.address)
            assert answer.failure is None
            assert answer.tokens == tiny.greedy(list(token_ids), len(answer.tokens))
            assert answer.usage is not None
            assert answer.usage.transferred_bytes > 0
        await pair.until_idle()
