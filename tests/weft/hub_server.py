"""A server that speaks the part of the Hub's API that downloads use, with a second address for large files."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

API = re.compile(r"/api/models/([^/]+/[^/]+)/revision/([^/?]+)")
FILE = re.compile(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)")
LARGE_SUFFIXES = (".safetensors", ".bin", ".gguf", ".onnx")
PIECE_BYTES = 1 << 20


@dataclass
class Repository:
    """One model. `token`: the one that may read it, if it is gated. `claimed_sizes`: listed in place of real ones."""

    files: dict[str, bytes]
    commit: str = "a" * 40
    token: str = ""
    claimed_sizes: dict[str, int] = field(default_factory=dict)
    is_listed: bool = True


@dataclass
class Hub:
    """The models, and what clients asked for. `stall_after`: bytes of a large file after which it sends no more."""

    models: dict[str, Repository] = field(default_factory=dict)
    asked: list[tuple[str, str, str]] = field(default_factory=list)
    """Method, path and range of each request."""
    sent: dict[str, int] = field(default_factory=dict)
    """Bytes of each large file."""
    leaked_tokens: list[str] = field(default_factory=list)
    """Tokens that the second address received."""
    stall_after: int | None = None
    flipped: int = 0
    """How many large files to send with a wrong byte."""
    released: threading.Event = field(default_factory=threading.Event)
    url: str = ""
    large_url: str = ""

    def paths(self, method: str) -> list[str]:
        return [path for each, path, _ in self.asked if each == method]


@contextmanager
def serving(hub: Hub) -> Iterator[Hub]:
    """Listen on two free ports until the block ends."""
    servers = [ThreadingHTTPServer(("127.0.0.1", 0), partial(kind, hub)) for kind in (HubHandler, LargeHandler)]
    hub.url, hub.large_url = (f"http://127.0.0.1:{server.server_port}" for server in servers)
    threads = [threading.Thread(target=server.serve_forever, args=(0.05,)) for server in servers]
    for thread in threads:
        thread.start()
    try:
        yield hub
    finally:
        hub.released.set()
        for server in servers:
            server.shutdown()
            server.server_close()
        for thread in threads:
            thread.join()


class Handler(BaseHTTPRequestHandler):
    """A request to either address."""

    protocol_version = "HTTP/1.1"

    def __init__(self, hub: Hub, *args: Any) -> None:
        self.hub = hub
        super().__init__(*args)

    def log_message(self, *_: Any) -> None:
        """Keep the output of tests clean."""

    def answer(self, status: int, headers: dict[str, str], content: bytes = b"") -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)


class HubHandler(Handler):
    """Lists models, answers small files, and redirects to the other address for large ones."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        if self.path == "/api/agent-harnesses":  # the library asks now and then, and not about models
            return self.answer(404, {})
        self.hub.asked.append((self.command, self.path, self.headers.get("Range", "")))
        if found := API.match(self.path):
            self._list(found[1], found[2])
        elif found := FILE.fullmatch(self.path):
            self._file(found[1], found[2], found[3])
        else:
            self.answer(404, {})
        return None

    def _list(self, name: str, revision: str) -> None:
        model = self.hub.models.get(name)
        if model is None:
            return self.answer(401, {"X-Error-Code": "RepoNotFound"})
        if revision not in ("main", model.commit):
            return self.answer(404, {"X-Error-Code": "RevisionNotFound"})
        if not model.is_listed:
            return self.answer(503, {})
        siblings = [_described(file, content) for file, content in model.files.items()]
        for each in siblings:
            each["size"] = model.claimed_sizes.get(each["rfilename"], each["size"])
        content = json.dumps({"_id": "1", "id": name, "sha": model.commit, "siblings": siblings}).encode()
        return self.answer(200, {"Content-Type": "application/json"}, content)

    def _file(self, name: str, revision: str, file: str) -> None:
        model = self.hub.models[name]
        assert revision in ("main", model.commit)
        if model.token and self.headers.get("Authorization") != f"Bearer {model.token}":
            return self.answer(401, {"X-Error-Code": "GatedRepo"})
        if (content := model.files.get(file)) is None:
            return self.answer(404, {"X-Error-Code": "EntryNotFound"})
        headers = {"X-Repo-Commit": model.commit, "ETag": f'"{_git_id(content)}"'}
        if not file.endswith(LARGE_SUFFIXES):
            return self.answer(200, headers, content)
        linked = {"X-Linked-Etag": f'"{hashlib.sha256(content).hexdigest()}"', "X-Linked-Size": str(len(content))}
        return self.answer(302, {**headers, **linked, "Location": f"{self.hub.large_url}/{name}/{file}"})


class LargeHandler(Handler):
    """Sends a large file or the rest of it, as a CDN does."""

    def do_GET(self) -> None:
        hub = self.hub
        if "Authorization" in self.headers:
            hub.leaked_tokens.append(self.headers["Authorization"])
        owner, repository, file = self.path.strip("/").split("/", 2)
        content = bytearray(hub.models[f"{owner}/{repository}"].files[file])
        if hub.flipped:
            hub.flipped -= 1
            content[len(content) // 2] ^= 1
        begin = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").removesuffix("-"))
        hub.asked.append((self.command, self.path, self.headers.get("Range", "")))
        self.send_response(206 if begin else 200)
        self.send_header("Content-Length", str(len(content) - begin))
        if begin:
            self.send_header("Content-Range", f"bytes {begin}-{len(content) - 1}/{len(content)}")
        self.end_headers()
        with suppress(ConnectionError):  # the client was killed
            self._send(file, memoryview(content)[begin:])

    def _send(self, file: str, content: memoryview) -> None:
        for place in range(0, len(content), PIECE_BYTES):
            if self.hub.stall_after is not None and place >= self.hub.stall_after:
                self.hub.released.wait()
                return
            self.wfile.write(content[place : place + PIECE_BYTES])
            self.hub.sent[file] = self.hub.sent.get(file, 0) + len(content[place : place + PIECE_BYTES])


def _git_id(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def _described(file: str, content: bytes) -> dict[str, Any]:
    described: dict[str, Any] = {"rfilename": file, "size": len(content), "blobId": _git_id(content)}
    if file.endswith(LARGE_SUFFIXES):
        digest = hashlib.sha256(content).hexdigest()
        described["lfs"] = {"sha256": digest, "size": len(content), "pointerSize": 134}
    return described
