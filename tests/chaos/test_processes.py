"""Cells with real processes: a mesh of one prefill and two decode workers, hit by signals while a request is under way.

transformers says which tokens must come, whatever happens.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import grpc
import httpx
import orjson
import pytest

from tests.mesh.conftest import Mesh, wait_until
from tests.mesh.oracle import greedy, prompts

pytestmark = pytest.mark.timeout(300)
LEASE_SECONDS = 3.0
PATIENCE_SECONDS = 150.0
NUM_WORKERS = 3
# within the lease, and long after everybody has given the frozen one up
SHORT_SECONDS, LONG_SECONDS = 1.0, 9.0
NUM_TOKENS = {"queued": 6, "prefilling": 6, "decoding": 60, "finished": 6}


@pytest.fixture(scope="module")
def chaos_mesh() -> Iterator[Mesh]:
    """Small chunks, so that there is much hand-off; a short lease; time to start again even on a busy machine."""
    environment = {"WEFT_CHUNK_TOKENS": "16", "WEFT_LEASE_SECONDS": str(LEASE_SECONDS), "WEFT_MOVE_SECONDS": "120"}
    running = Mesh("--transport", "mooncake", "--decode", "2", environment=environment)
    try:
        running.wait_ready()
        yield running
    finally:
        running.stop()


@dataclass
class Stream:
    """One streamed completion in a thread of its own, and what came of it."""

    mesh: Mesh
    prompt: list[int]
    num_tokens: int
    tokens: list[int] = field(default_factory=list)
    ends: list[str] = field(default_factory=list)
    errors: list[Any] = field(default_factory=list)
    refusal: int = 0  # the status, when it was never placed
    leaves: threading.Event = field(default_factory=threading.Event)

    def read(self) -> None:
        """To its end, or until it is to leave."""
        body = {"model": "weft-nano", "prompt": self.prompt, "max_tokens": self.num_tokens, "stream": True}
        body |= {"ignore_eos": True, "temperature": 0, "return_token_ids": True}
        url = f"{self.mesh.url}/v1/completions"
        with httpx.stream("POST", url, json=body, timeout=PATIENCE_SECONDS) as response:
            if response.status_code != 200:
                self.refusal = response.status_code
                return
            for line in response.iter_lines():
                if self.leaves.is_set():
                    return
                if line.startswith("data: "):
                    self._take(line.removeprefix("data: "))

    def _take(self, data: str) -> None:
        if data == "[DONE]":
            self.ends.append(data)
            return
        frame = orjson.loads(data)
        if "error" in frame:
            self.errors.append(frame["error"])
        for choice in frame.get("choices", ()):
            self.tokens += choice.get("token_ids") or []
            if choice["finish_reason"]:
                self.ends.append(choice["finish_reason"])

    def expect_right(self, may_be_refused: bool = False) -> None:
        """All tokens, and one end; or one status that says to come again, where nobody could take it just then."""
        if may_be_refused and self.refusal:
            assert self.refusal in (429, 503)
            return
        assert (self.refusal, self.errors) == (0, [])
        assert self.tokens == greedy(self.prompt, self.num_tokens)
        assert self.ends == ["length", "[DONE]"]


def _frozen(mesh: Mesh, name: str, seconds: float) -> None:
    process = mesh.valkey() if name == "valkey" else mesh.child(name)
    process.send_signal(signal.SIGSTOP)
    time.sleep(seconds)
    process.send_signal(signal.SIGCONT)


def _killed(mesh: Mesh, *names: str) -> None:
    for name in names:
        (mesh.valkey() if name == "valkey" else mesh.child(name)).send_signal(signal.SIGKILL)


def _decode(mesh: Mesh) -> str:
    """The decode worker that is at work, or the first."""
    statuses = mesh.workers()
    busy = [name for name, status in statuses.items() if name.startswith("decode") and status.booked_requests]
    return busy[0] if busy else "decode-0"


FAULTS: dict[str, Callable[[Mesh], None]] = {
    "SIGKILL prefill": lambda mesh: _killed(mesh, "prefill-0"),
    "SIGKILL decode": lambda mesh: _killed(mesh, _decode(mesh)),
    "SIGKILL prefill and decode": lambda mesh: _killed(mesh, "prefill-0", _decode(mesh)),
    "SIGSTOP prefill, short": lambda mesh: _frozen(mesh, "prefill-0", SHORT_SECONDS),
    "SIGSTOP prefill, long": lambda mesh: _frozen(mesh, "prefill-0", LONG_SECONDS),
    "SIGSTOP decode, short": lambda mesh: _frozen(mesh, _decode(mesh), SHORT_SECONDS),
    "SIGSTOP decode, long": lambda mesh: _frozen(mesh, _decode(mesh), LONG_SECONDS),
    "kvstore dead, then empty": lambda mesh: _killed(mesh, "kvstore"),
    "kvstore frozen": lambda mesh: _frozen(mesh, "kvstore", LONG_SECONDS),
    "valkey dead": lambda mesh: _killed(mesh, "valkey"),
    "valkey frozen": lambda mesh: _frozen(mesh, "valkey", SHORT_SECONDS),
    "scheduler restarts": lambda mesh: _killed(mesh, "scheduler"),
    "client gone": lambda mesh: None,
}
CELLS = [(fault, state) for fault in FAULTS for state in NUM_TOKENS]
QUICK = [("SIGSTOP prefill, short", "prefilling"), ("SIGKILL decode", "decoding")]
_salts = iter(range(100, 1700))


def _reach(mesh: Mesh, stream: Stream, state: str, ending: Future[None]) -> None:
    if state == "prefilling":
        # its own tokens: those of the one beside it may still be on the books
        wait_until("the prompt is being computed", lambda: mesh.workers()["prefill-0"].booked_prefill_tokens > 450)
    if state == "decoding":
        wait_until("tokens come", lambda: len(stream.tokens) >= 3)
    if state == "finished":
        ending.result(60)


def test_processes(chaos_mesh: Mesh, cell: tuple[str, str]) -> None:
    fault, state = cell
    mesh = chaos_mesh
    length = 900 if state == "prefilling" else 150
    stream = Stream(mesh, prompts(1, length, length, next(_salts))[0], NUM_TOKENS[state])
    beside = Stream(mesh, prompts(1, 200, 200, next(_salts))[0], 90)
    # the cell before may have failed halfway
    wait_until("all workers are there", lambda: _is_whole(mesh), PATIENCE_SECONDS)
    boots = mesh.boots()
    with ThreadPoolExecutor(2) as pool:
        others = pool.submit(beside.read)
        wait_until("the one beside it has begun", lambda: bool(beside.tokens))
        ending = pool.submit(stream.read)
        _reach(mesh, stream, state, ending)
        if fault == "client gone":
            stream.leaves.set()
        FAULTS[fault](mesh)
        ending.result(PATIENCE_SECONDS)
        others.result(PATIENCE_SECONDS)
    if fault != "client gone" or state == "finished":
        stream.expect_right(may_be_refused=state == "queued")
    beside.expect_right()
    wait_until("all workers are back", lambda: _are_back(mesh, boots, fault), PATIENCE_SECONDS)
    mesh.wait_idle()
    after = Stream(mesh, stream.prompt, 8)
    after.read()
    after.expect_right()


def _are_back(mesh: Mesh, boots: dict[str, str], fault: str) -> bool:
    return _is_whole(mesh) and ("SIGKILL" not in fault or mesh.boots() != boots)


def _is_whole(mesh: Mesh) -> bool:
    try:
        workers = mesh.workers().values()
    except grpc.RpcError:  # a scheduler that is not back yet
        return False
    return len(workers) == NUM_WORKERS and all(status.report.ready for status in workers) and mesh.is_ready()
