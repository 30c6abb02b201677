"""The hand-off from end to end: tokens as one engine makes them, whatever moves the blocks."""

from __future__ import annotations

import asyncio

import pytest

from tests.services.workers import BLOCK_TOKENS, CHUNK_TOKENS, prompt, start_pair
from tests.weft.tiny_llama import Tiny
from weft import metrics


def transferred(transport: str) -> float:
    return metrics.TRANSFER_BYTES.labels(transport)._value.get()


@pytest.mark.parametrize("transport", ["grpc", "mooncake"])
async def test_tokens_are_those_of_a_single_engine(tiny: Tiny, transport: str) -> None:
    async with start_pair(tiny, transport) as pair:
        before = transferred(transport)
        for length in (1, 3, 4, 5, 8, 23, 64):
            token_ids = prompt(length, seed=length)
            answer = await pair.gateway.generate(token_ids, pair.prefill.address)
            assert answer.failure is None
            assert answer.tokens == pair.expected(token_ids)
            assert answer.usage is not None
            assert answer.usage.prefill_worker_id == "prefill-0"
            num_blocks = -(-length // BLOCK_TOKENS)
            assert answer.usage.transferred_bytes == num_blocks * pair.decode.place.memory.block_bytes
            before += answer.usage.transferred_bytes
            assert transferred(transport) == before
        await pair.until_idle()
