"""Many streams with random cancels, and afterwards nothing is missing anywhere."""

from __future__ import annotations

import asyncio
import random

import pytest
from openai import AsyncOpenAI

from tests.mesh.conftest import Mesh
from tests.mesh.oracle import text_ids

STREAMS, ROUNDS = 32, 20


async def one_stream(client: AsyncOpenAI, dice: random.Random) -> int:
    """A streamed completion, in a third of the cases dropped after a few tokens or at once; returns chunks read."""
    ids = text_ids()
    start, length = dice.randrange(len(ids) - 200), dice.randint(1, 200)
    cancel_after = dice.randint(0, 6) if dice.random() < 0.34 else None
    stream = await client.completions.create(
        model="weft-nano",
        prompt=list(ids[start : start + length]),
        max_tokens=dice.randint(1, 16),
        temperature=dice.choice((0.0, 1.0)),
        stream=True,
        extra_body={"ignore_eos": True},
        extra_headers={"x-session-affinity": f"load-{dice.randrange(8)}"},
    )
    count = 0
    async with stream:
        async for _ in stream:
            count += 1
            if cancel_after is not None and count > cancel_after:
                break
    return count


@pytest.mark.timeout(400)
async def test_32_streams_of_20_rounds_with_random_cancels_lose_nothing(mesh: Mesh) -> None:
    dice = random.Random(20)
    async with AsyncOpenAI(base_url=f"{mesh.url}/v1", api_key="none", max_retries=0, timeout=120) as client:

        async def rounds(own: random.Random) -> int:
            return sum([await one_stream(client, own) for _ in range(ROUNDS)])

        counts = await asyncio.gather(*(rounds(random.Random(dice.random())) for _ in range(STREAMS)))
    assert min(counts) > 0
    mesh.wait_idle()
