"""`weft set-role` on a running mesh: roles swap under a stream, and every token stays what transformers says."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.mesh.conftest import Mesh, wait_until
from tests.mesh.oracle import greedy, prompts
from tests.mesh.test_tokens import assert_exact
from weft.request import WorkerRole
from weft.rpc.wire import role_from_wire

pytestmark = pytest.mark.timeout(300)
WEFT = [sys.executable, "-m", "weft.cli.main"]
BEGIN = {"prefill-0": "prefill", "decode-0": "decode"}


def ask(mesh: Mesh, worker: str, role: str) -> subprocess.CompletedProcess[str]:
    address = mesh.child("gateway").environ()["WEFT_SCHEDULER_ADDR"]
    command = [*WEFT, "set-role", worker, role, "--scheduler", address]
    return subprocess.run(command, capture_output=True, text=True, timeout=30)


def change(mesh: Mesh, worker: str, role: str) -> None:
    assert ask(mesh, worker, role).returncode == 0
    wait_until(f"{worker} plays {role}", lambda: roles(mesh)[worker] is WorkerRole(role))


def roles(mesh: Mesh) -> dict[str, WorkerRole]:
    return {name: role_from_wire(status.hello.role) for name, status in mesh.workers().items()}


@pytest.fixture
def swapped(mesh: Mesh) -> Iterator[Mesh]:
    """The shared mesh, put back as it was."""
    yield mesh
    for role in ("both", ""):
        for worker, own in BEGIN.items():
            change(mesh, worker, role or own)


def long_answer(mesh: Mesh, prompt: list[int], num_tokens: int) -> list[int]:
    """Streamed; the token ids of all chunks."""
    body = {"model": "weft-nano", "prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
    body |= {"stream": True, "return_token_ids": True}
    ids: list[int] = []
    with mesh.client.stream("POST", "/v1/completions", json=body) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                ids += json.loads(line[6:])["choices"][0].get("token_ids") or []
    return ids


def test_prefill_and_decode_swap_under_a_stream_and_nothing_is_lost(swapped: Mesh) -> None:
    mesh, boots = swapped, swapped.boots()
    (prompt,) = prompts(1, 60, 60, salt=21)
    assert "last prefill worker" in ask(mesh, "prefill-0", "decode").stderr
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(long_answer, mesh, prompt, 400)
        for worker, role in (("prefill-0", "both"), ("decode-0", "prefill"), ("prefill-0", "decode")):
            change(mesh, worker, role)
        assert roles(mesh) == {"prefill-0": WorkerRole.DECODE, "decode-0": WorkerRole.PREFILL}
        before = mesh.metric("prefill-0", "weft_engine_tokens_total", kind="generated")
        assert_exact(mesh, prompts(4, 20, 200, salt=22))
        assert mesh.metric("prefill-0", "weft_engine_tokens_total", kind="generated") > before
        assert answer.result(120) == greedy(prompt, 400)
    assert mesh.boots() == boots
    mesh.wait_idle()
