"""Workers that are groups of two processes: exact answers, and what becomes of them when a rank dies or freezes."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator

import httpx
import orjson
import psutil
import pytest

from tests.mesh.conftest import Mesh, is_alive, wait_until
from tests.mesh.oracle import greedy, prompts
from tests.mesh.test_failures import assert_works, lines, stream_body
from tests.mesh.test_sleep import weft
from tests.mesh.test_tokens import assert_exact

pytestmark = pytest.mark.timeout(300)
NUM_TOKENS = 300
RANK = "decode-0.1"


@pytest.fixture(scope="module")
def groups() -> Iterator[Mesh]:
    settings = {"WEFT_CHUNK_TOKENS": "16", "WEFT_MAX_QUEUE_WAIT_SECONDS": "4"}
    running = Mesh("--tp", "2", "--transport", "mooncake", environment=settings)
    try:
        running.wait_ready()
        yield running
    finally:
        running.stop()


def rank_of(mesh: Mesh) -> psutil.Process:
    return mesh.child(RANK)


def test_hand_offs_between_groups_give_the_tokens_of_transformers(groups: Mesh) -> None:
    assert_exact(groups, prompts(8, 1, 200, salt=81))
    assert_exact(groups, prompts(8, 1, 200, salt=81))
    groups.wait_idle()


def test_a_stream_goes_on_when_a_rank_is_killed(groups: Mesh) -> None:
    lose_rank(groups, signal.SIGKILL, "has ended (signal 9)")
    assert_works(groups)
    groups.wait_idle()


def lose_rank(mesh: Mesh, number: signal.Signals, reason: str, salt: int = 90) -> float:
    """Signal a rank of the decode worker during an answer; return the seconds until the worker was ready again."""
    prompt = prompts(1, 60, 60, salt=salt)[0]
    boots, rank, prefill = mesh.boots(), rank_of(mesh), mesh.child("prefill-0.1")
    body = stream_body(prompt, NUM_TOKENS) | {"return_token_ids": True}
    with mesh.client.stream("POST", "/v1/completions", json=body, timeout=httpx.Timeout(60, read=45)) as response:
        frames = lines(response)
        received = [next(frames) for _ in range(3)]
        rank.send_signal(number)
        lost_at = time.monotonic()
        received += list(frames)
    assert received.pop() == "[DONE]"
    choices = [orjson.loads(frame)["choices"][0] for frame in received]
    assert [token for choice in choices for token in choice["token_ids"]] == greedy(prompt, NUM_TOKENS)
    mesh.wait_for_return(boots, "decode-0")
    seconds = time.monotonic() - lost_at
    assert f"group lost, the worker ends reason='rank 1 {reason}'" in mesh.log()
    wait_until("the lost rank is gone", lambda: not is_alive(rank))
    assert rank_of(mesh).pid != rank.pid
    assert is_alive(prefill)
    assert mesh.boots()["prefill-0"] == boots["prefill-0"]
    return seconds


def test_ranks_are_shown(groups: Mesh) -> None:
    shown = weft(groups, "status")
    assert "TP2" in shown
    told = orjson.loads(weft(groups, "status", "--json"))["workers"]
    assert {each["worker_id"]: each["layout"] for each in told} == {"decode-0": "TP2", "prefill-0": "TP2"}
