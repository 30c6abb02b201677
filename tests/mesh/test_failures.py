"""Processes that die in the middle: the client waits, the mesh comes back, the answer is as if nothing had been."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import orjson
import pytest

from tests.mesh.conftest import Mesh, wait_until
from tests.mesh.oracle import greedy, text_ids

NUM_TOKENS = 400
pytestmark = pytest.mark.timeout(300)


def lines(response: httpx.Response) -> Iterator[str]:
    """The data of every SSE frame."""
    for line in response.iter_lines():
        if line.startswith("data: "):
            yield line.removeprefix("data: ")


def stream_body(prompt: list[int], num_tokens: int) -> dict[str, object]:
    return {
        "model": "weft-nano",
        "prompt": prompt,
        "max_tokens": num_tokens,
        "stream": True,
        "ignore_eos": True,
        "temperature": 0,
    }


def assert_works(mesh: Mesh) -> None:
    body = {"model": "weft-nano", "prompt": list(text_ids()[:50]), "max_tokens": 4}
    reply = mesh.client.post("/v1/completions", json=body)
    assert reply.status_code == 200, reply.text


def test_a_stream_goes_on_when_its_only_decode_worker_is_back(mesh: Mesh) -> None:
    prompt = list(text_ids()[:40])
    body = stream_body(prompt, NUM_TOKENS) | {"return_token_ids": True}
    boots, worker, num_moves = (
        mesh.boots(),
        mesh.child("decode-0"),
        mesh.log().count("sequence migrated worker=decode-0"),
    )
    with mesh.client.stream("POST", "/v1/completions", json=body, timeout=httpx.Timeout(60, read=45)) as response:
        frames = lines(response)
        received = [next(frames) for _ in range(3)]
        worker.kill()
        received += list(frames)
    assert received.pop() == "[DONE]"
    choices = [orjson.loads(frame)["choices"][0] for frame in received]
    assert [token for choice in choices for token in choice["token_ids"]] == greedy(prompt, NUM_TOKENS)
    assert choices[-1]["finish_reason"] == "length"
    mesh.wait_for_return(boots, "decode-0")
    assert mesh.log().count("sequence migrated worker=decode-0") > num_moves
    assert_works(mesh)


def ask_while_there_is_nobody(mesh: Mesh, body: dict[str, object]) -> tuple[list[httpx.Response], float]:
    """Eight answers, and the seconds after which decode was back."""
    boots, began = mesh.boots(), time.monotonic()
    with ThreadPoolExecutor(8) as pool:
        mesh.kill("decode-0")
        wait_until("the scheduler knows", lambda: mesh.boots().get("decode-0") != boots["decode-0"])
        replies = list(pool.map(lambda _: mesh.client.post("/v1/completions", json=body), range(8)))
    mesh.wait_for_return(boots, "decode-0")
    return replies, time.monotonic() - began


def test_who_asks_while_a_role_has_nobody_waits_until_it_has(mesh: Mesh) -> None:
    """Up to the longest wait, 4 s: where the machine took longer to start a process, it says nothing of that."""
    body: dict[str, object] = {"model": "weft-nano", "prompt": list(text_ids()[:50]), "max_tokens": 4}
    for _ in range(3):
        replies, seconds = ask_while_there_is_nobody(mesh, body)
        if seconds < 3.5:
            break
    assert {reply.status_code for reply in replies} == {200}, [reply.text for reply in replies]


def read_stream(mesh: Mesh, body: dict[str, object]) -> list[str]:
    with mesh.client.stream("POST", "/v1/completions", json=body, timeout=httpx.Timeout(60, read=30)) as response:
        return list(lines(response))


def test_prefill_killed_mid_prompt_is_not_noticed_by_the_client(mesh: Mesh) -> None:
    prompt = (list(text_ids()) * 4)[7:1500]
    with ThreadPoolExecutor(1) as pool:
        frames = pool.submit(read_stream, mesh, stream_body(prompt, 8))
        wait_until("the prompt is being computed", lambda: mesh.workers()["prefill-0"].booked_prefill_tokens > 0)
        boots = mesh.boots()
        mesh.kill("prefill-0")
        *chunks, last = frames.result(60)
    assert last == "[DONE]"
    # the decode worker computes the prompt itself
    assert orjson.loads(chunks[-1])["choices"][0]["finish_reason"] == "length"
    mesh.wait_for_return(boots, "prefill-0")
    assert_works(mesh)


def test_requests_succeed_without_valkey(mesh: Mesh) -> None:
    mesh.valkey().send_signal(signal.SIGKILL)
    for _ in range(3):
        body = {"model": "weft-nano", "prompt": "Hello", "max_tokens": 2}
        reply = mesh.client.post("/v1/completions", json=body, headers={"x-session-affinity": "a"})
        assert reply.status_code == 200, reply.text


def test_requests_succeed_without_kvstore(mesh: Mesh) -> None:
    mesh.kill("kvstore")
    for start in range(3):
        body = {"model": "weft-nano", "prompt": list(text_ids()[start : start + 100]), "max_tokens": 2}
        reply = mesh.client.post("/v1/completions", json=body)
        assert reply.status_code == 200, reply.text
    mesh.wait_idle()
