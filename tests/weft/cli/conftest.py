"""A gateway that answers from a script over real HTTP."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

USAGE = {"prompt_tokens": 20, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 16}}
HELLO = [
    {"choices": [{"delta": {"role": "assistant", "content": ""}, "finish_reason": None}]},
    {"choices": [{"delta": {"content": "Hel"}, "finish_reason": None}]},
    {"choices": [{"delta": {"content": "lo\x1b[2J"}, "finish_reason": "stop"}]},
    {"choices": [], "usage": USAGE},
    "[DONE]",
]
# in a script: the stream stays open and silent
HOLD = object()


class Gateway:
    """Answers each POST with the next script; keeps what it was asked."""

    def __init__(self) -> None:
        self.scripts: list[list[Any]] = []
        self.status = 200
        self.models = json.dumps({"data": [{"id": "tiny"}]})
        self.unknown_fields: set[str] = set()
        self.released = threading.Event()
        self.asked: list[tuple[str, dict[str, Any], str | None]] = []
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, self))
        self.url = f"http://127.0.0.1:{self.server.server_port}"


class Handler(BaseHTTPRequestHandler):
    """A request to such a gateway."""

    def __init__(self, gateway: Gateway, *args: Any) -> None:
        self.gateway = gateway
        super().__init__(*args)

    def do_GET(self) -> None:
        self._send(200, self.gateway.models)

    def do_POST(self) -> None:
        gateway = self.gateway
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        gateway.asked.append((self.path, body, self.headers.get("x-session-affinity")))
        if unknown := gateway.unknown_fields & body.keys():
            self._send(400, json.dumps({"error": {"message": f"unknown parameter: {', '.join(unknown)}"}}))
            return
        if gateway.status != 200:
            self._send(gateway.status, json.dumps({"error": {"message": "model: no such model"}}))
            return
        self.send_response(200)
        self.end_headers()
        for event in gateway.scripts.pop(0):
            if event is HOLD:
                gateway.released.wait(30)
                return
            if isinstance(event, bytes):
                self.wfile.write(event)
                continue
            text = event if isinstance(event, str) else json.dumps(event)
            self.wfile.write(f"data: {text}\n\n".encode())

    def _send(self, status: int, text: str) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet."""


@pytest.fixture
def gateway() -> Iterator[Gateway]:
    gateway = Gateway()
    thread = threading.Thread(target=gateway.server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield gateway
    gateway.server.shutdown()
    gateway.server.server_close()
    thread.join()
