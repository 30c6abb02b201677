"""An OpenAI server without a model, behind the other routers: `python -m loadtest.gateway.fake_openai`.

It writes a chunk per token at a set pace, or as fast as the connection takes them. The benchmark does not count its
cost, but a slow server would slow the router on the same cores; so it is a bare protocol.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from typing import Any

import httptools
import uvloop

# what routers ask of a worker before they send requests
FACTS: dict[str, Any] = {
    "object": "list",
    "data": [{"id": "mock", "object": "model", "created": 1, "owned_by": "mock"}],
    "status": "ok",
    "model_path": "mock",
    "served_model_name": "mock",
    "is_generation": True,
    "tp_size": 1,
    "dp_size": 1,
}
COMMON = {"id": "chatcmpl-0123456789abcdef0123456789abcdef", "created": 1, "model": "mock", "system_fingerprint": None}
# different words, because LiteLLM takes a model that repeats itself for broken
WORDS = " the river runs past an old mill and then a town before it meets the sea".split(" ")[1:]


def frame(**fields: Any) -> bytes:
    """One event of a stream."""
    event = {**COMMON, "object": "chat.completion.chunk", **fields}
    return b"data: " + json.dumps(event, separators=(",", ":")).encode() + b"\n\n"


def choice(delta: dict[str, str], finish_reason: str | None = None) -> dict[str, Any]:
    """The one choice of an event."""
    return {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}


TOKENS = [frame(choices=[choice({"content": f" {word}"})], usage=None) for word in WORDS]


def ending(num_tokens: int) -> bytes:
    """Return the events after the tokens."""
    usage = {"prompt_tokens": 20, "completion_tokens": num_tokens, "total_tokens": 20 + num_tokens}
    return frame(choices=[choice({}, "length")], usage=None) + frame(choices=[], usage=usage) + b"data: [DONE]\n\n"


def whole(num_tokens: int) -> bytes:
    """Return an answer that is not streamed."""
    message = {"role": "assistant", "content": " token" * num_tokens}
    usage = {"prompt_tokens": 20, "completion_tokens": num_tokens, "total_tokens": 20 + num_tokens}
    choices = [{"index": 0, "message": message, "logprobs": None, "finish_reason": "length"}]
    return json.dumps({**COMMON, "object": "chat.completion", "choices": choices, "usage": usage}).encode()


def chunked(data: bytes) -> bytes:
    """Return an HTTP chunk."""
    return b"%x\r\n%b\r\n" % (len(data), data)


class Connection(asyncio.Protocol):
    """One connection of a router."""

    def __init__(self, step_seconds: float) -> None:
        self._step_seconds = step_seconds
        self._parser = httptools.HttpRequestParser(self)
        self._body = b""
        self._path = ""
        self._may_write = asyncio.Event()
        self._may_write.set()
        self._answering: asyncio.Task[None] | None = None

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        if self._answering is not None:
            self._answering.cancel()

    def pause_writing(self) -> None:
        self._may_write.clear()

    def resume_writing(self) -> None:
        self._may_write.set()

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_message_begin(self) -> None:
        self._body, self._path = b"", ""

    def on_url(self, url: bytes) -> None:
        self._path += url.decode()

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        if not self._path.endswith("/completions"):
            self._whole(json.dumps(FACTS).encode())
            return
        asked = json.loads(self._body)
        num_tokens = int(asked.get("max_completion_tokens") or asked.get("max_tokens") or 1)
        if asked.get("stream"):
            self._answering = asyncio.get_running_loop().create_task(self._stream(num_tokens))
        else:
            self._whole(whole(num_tokens))

    def _whole(self, body: bytes) -> None:
        head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
        self._transport.write(head + body)

    async def _stream(self, num_tokens: int) -> None:
        head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        opening = chunked(frame(choices=[choice({"role": "assistant", "content": ""})], usage=None))
        self._transport.write(head + opening)
        chunks, due, said = [chunked(token) for token in TOKENS], time.monotonic(), 0
        while said < num_tokens:
            # without a pace, several at once
            now = 1 if self._step_seconds else min(num_tokens - said, len(chunks))
            self._transport.write(b"".join(chunks[place % len(chunks)] for place in range(said, said + now)))
            said += now
            due += self._step_seconds
            await asyncio.sleep(max(0.0, due - time.monotonic()) if self._step_seconds else 0)
            await self._may_write.wait()
        self._transport.write(chunked(ending(num_tokens)) + b"0\r\n\r\n")


async def serve(port: int, steps_per_second: float) -> None:
    """Serve until the process ends."""
    step_seconds = 1 / steps_per_second if steps_per_second else 0.0
    server = await asyncio.get_running_loop().create_server(lambda: Connection(step_seconds), "127.0.0.1", port)
    await server.serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m loadtest.gateway.fake_openai", description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--steps-per-second", type=float, default=0.0, help="0: as fast as they are taken")
    options = parser.parse_args()
    uvloop.run(serve(options.port, options.steps_per_second))


if __name__ == "__main__":
    main()
