"""What is cached, what is moved, and that the numbers say so."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.mesh.conftest import Mesh
from tests.mesh.oracle import prompts

pytestmark = pytest.mark.timeout(300)
BLOCK = 16


def ask(mesh: Mesh, prompt: list[int], num_tokens: int = 4) -> dict[str, Any]:
    body = {"model": "weft-nano", "prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
    reply = mesh.client.post("/v1/completions", json=body | {"return_token_ids": True})
    assert reply.status_code == 200, reply.text
    answer: dict[str, Any] = reply.json()
    return answer


def fresh_prompt(length: int) -> list[int]:
    """Tokens that no other test has asked with."""
    return [random.randrange(300, 1000) for _ in range(length)]


@pytest.mark.parametrize("length", [20, 64, 65, 250])
def test_transferred_bytes_are_exactly_the_blocks_handed_off(mesh: Mesh, length: int) -> None:
    name = "weft_kv_transfer_bytes_total"
    before = mesh.metric("decode-0", name, transport="mooncake")
    ask(mesh, fresh_prompt(length))
    blocks = -(-length // BLOCK)
    size = mesh.workers()["decode-0"].hello.fingerprint.block_bytes
    assert mesh.metric("decode-0", name, transport="mooncake") - before == blocks * size


def test_blocks_that_decode_holds_are_not_transferred_again(mesh: Mesh) -> None:
    start = fresh_prompt(96)
    ask(mesh, start)
    name, size = "weft_kv_transfer_bytes_total", mesh.workers()["decode-0"].hello.fingerprint.block_bytes
    before = mesh.metric("decode-0", name, transport="mooncake")
    ask(mesh, start + fresh_prompt(144))
    assert mesh.metric("decode-0", name, transport="mooncake") - before == 9 * size


def test_turn_two_reports_all_full_blocks_of_turn_one(mesh: Mesh) -> None:
    first = fresh_prompt(150)
    answer = ask(mesh, first, num_tokens=30)
    turn_one = first + answer["choices"][0]["token_ids"]
    # the last token was sampled, its own KV never computed
    full = (len(turn_one) - 1) // BLOCK * BLOCK
    mesh.wait_idle()  # with all of its blocks in the store
    answer = ask(mesh, turn_one + fresh_prompt(40))
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == full


def test_a_chat_session_reuses_its_own_turns(mesh: Mesh) -> None:
    headers = {"x-session-affinity": "ses-test-1"}
    messages: list[dict[str, str]] = [
        {"role": "system", "content": "You are Weft Nano, a helpful assistant."},
        {"role": "user", "content": "Please remember that my locker code is 7319. " * 4},
    ]
    cached, prompt = [], []
    for question in ("What is my locker code?", "Thanks. And what was it again?"):
        body = {"model": "weft-nano", "messages": messages, "temperature": 0, "max_tokens": 24}
        answer = mesh.client.post("/v1/chat/completions", json=body, headers=headers).json()
        cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
        prompt.append(answer["usage"]["prompt_tokens"])
        messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
        messages.append({"role": "user", "content": question})
    assert cached[1] >= (prompt[0] - 1) // BLOCK * BLOCK


def test_a_prefix_computed_by_a_killed_prefill_worker_is_found_in_the_store(mesh: Mesh) -> None:
    prompt = prompts(1, 200, 200, salt=9)[0]
    ask(mesh, prompt)
    mesh.wait_idle()
    mesh.kill_and_wait_for_return("prefill-0", "decode-0")
    answer = ask(mesh, prompt)
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 192
    assert mesh.metric("prefill-0", "weft_prefix_cache_hit_tokens_total", tier="dram") == 192
