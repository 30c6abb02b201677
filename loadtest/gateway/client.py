"""A client that costs little, so that the server it talks to is the busy one: `python -m loadtest.gateway.client`.

Each connection sends requests one after another and looks only at the end of an answer and its token count. Prints what
it saw as JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import time
from dataclasses import asdict, dataclass, field
from typing import Any

import httptools
import uvloop

COUNT = re.compile(rb'"completion_tokens":\s*(\d+)')
TAIL_BYTES = 1024
QUESTION = "What is a mesh of small services, and why would somebody build one?"


@dataclass(frozen=True, slots=True)
class Load:
    """`requests` in all, in turns over the connections.

    With `per_second` each connection sends at set times, that many requests a second over all of them, or at once where
    an answer came later; with 0 each sends as soon as it is answered.
    """

    connections: int
    requests: int
    max_tokens: int = 1
    stream: bool = False
    per_second: float = 0.0

    @property
    def period(self) -> float:
        """Seconds between two requests of a connection."""
        return self.connections / self.per_second if self.per_second else 0.0


@dataclass(slots=True)
class Seen:
    """What the client saw. Times in seconds, latencies in no order."""

    seconds: float = 0.0
    client_cpu: float = 0.0
    latencies: list[float] = field(default_factory=list)
    num_tokens: int = 0
    num_events: int = 0
    errors: list[str] = field(default_factory=list)


def request_bytes(model: str, max_tokens: int, stream: bool, **more: Any) -> bytes:
    """Return a chat completion with a short question as HTTP/1.1."""
    fields: dict[str, Any] = {
        "model": model,
        "messages": [{"role": "user", "content": QUESTION}],
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "temperature": 0,
        **more,
    }
    if stream:
        fields |= {"stream": True, "stream_options": {"include_usage": True}}
    body = json.dumps(fields).encode()
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer none\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


class Asker(asyncio.Protocol):
    """One connection; `ended` is set when no request is left."""

    def __init__(self, load: Load, question: bytes, left: list[int], seen: Seen) -> None:
        self.ended = asyncio.get_running_loop().create_future()
        self._load, self._question, self._left, self._seen = load, question, left, seen
        self._tail = b""
        self._due = 0.0

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def begin(self, due: float) -> None:
        """Send the first request at a time of the loop."""
        self._due = due
        asyncio.get_running_loop().call_at(due, self._ask)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.ended.done():
            self._end(f"connection lost: {exc}")

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_body(self, body: bytes) -> None:
        self._seen.num_events += body.count(b"data: ")
        self._tail = (self._tail + body)[-TAIL_BYTES:]

    def on_message_complete(self) -> None:
        self._seen.latencies.append(time.perf_counter() - self._began)
        status, counts = self._parser.get_status_code(), COUNT.findall(self._tail)
        if status != 200 or not counts or int(counts[-1]) != self._load.max_tokens:
            self._end(f"HTTP {status}: {self._tail[-300:]!r}")
            return
        self._seen.num_tokens += self._load.max_tokens
        loop = asyncio.get_running_loop()
        self._due = max(self._due + self._load.period, loop.time())
        if self._load.period:
            loop.call_at(self._due, self._ask)
        else:
            self._ask()

    def _ask(self) -> None:
        if not self._left[0]:
            self._end("")
            return
        self._left[0] -= 1
        self._tail, self._parser = b"", httptools.HttpResponseParser(self)
        self._began = time.perf_counter()
        self._transport.write(self._question)

    def _end(self, error: str) -> None:
        if error:
            self._seen.errors.append(error)
        self.ended.set_result(None)
        self._transport.close()


async def run(port: int, model: str, load: Load) -> Seen:
    """Send all requests."""
    loop, seen, left = asyncio.get_running_loop(), Seen(), [load.requests]
    question, askers = request_bytes(model, load.max_tokens, load.stream), []
    for _ in range(min(load.connections, load.requests)):
        _, asker = await loop.create_connection(lambda: Asker(load, question, left, seen), "127.0.0.1", port)
        askers.append(asker)
    start, began, own = loop.time(), time.perf_counter(), time.process_time()
    for place, asker in enumerate(askers):
        asker.begin(start + load.period * place / load.connections)
    await asyncio.gather(*(asker.ended for asker in askers))
    seen.seconds, seen.client_cpu = time.perf_counter() - began, time.process_time() - own
    return seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("port", type=int)
    parser.add_argument("model")
    parser.add_argument("load", type=json.loads, help="fields of Load as JSON")
    options = parser.parse_args()
    print(json.dumps(asdict(uvloop.run(run(options.port, options.model, Load(**options.load))))))


if __name__ == "__main__":
    main()
