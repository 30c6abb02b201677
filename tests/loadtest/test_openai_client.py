"""What other people's servers say, as the benchmarks' client takes it."""

from __future__ import annotations

import httpx
import pytest
from loadtest.openai_client import Server, ask

TEXT = '{"error": null, "choices": [{"text": "Hi"}]}'


@pytest.mark.parametrize(
    ("events", "error"),
    [
        ([TEXT, "[DONE]"], ""),
        ([TEXT, '{"error": "model is overloaded"}'], "model is overloaded"),
        ([TEXT, '{"error": {"message": "worker 3 lost at 12:04", "code": "lost"}}'], "lost"),
    ],
)
async def test_an_error_may_be_a_text_or_none(events: list[str], error: str) -> None:
    body = "".join(f"data: {event}\n\n" for event in events)
    transport = httpx.MockTransport(lambda _: httpx.Response(200, stream=httpx.ByteStream(body.encode())))
    async with httpx.AsyncClient(transport=transport, base_url="http://peer") as client:
        sample = await ask(Server("peer", client, "tiny", 4.0), "Hello", 8)
    assert sample.error == error
