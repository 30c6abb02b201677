"""Greedy fp32 tokens through separate processes and Mooncake are transformers' tokens: cold, warm, from the store."""

from __future__ import annotations

from typing import Any

import pytest

from tests.mesh.conftest import Mesh
from tests.mesh.oracle import greedy, mean_hidden, prompts

pytestmark = pytest.mark.timeout(300)
NUM_TOKENS = 12


def complete(mesh: Mesh, prompt: list[int], **extra: Any) -> dict[str, Any]:
    body = {"model": "weft-nano", "prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0}
    body |= {"ignore_eos": True, "return_token_ids": True, **extra}
    reply = mesh.client.post("/v1/completions", json=body)
    assert reply.status_code == 200, reply.text
    answer: dict[str, Any] = reply.json()
    return answer


def assert_exact(mesh: Mesh, asked: list[list[int]]) -> list[int]:
    """Every prompt's tokens equal the oracle's; returns the cached tokens of each."""
    cached = []
    for prompt in asked:
        answer = complete(mesh, prompt)
        assert answer["choices"][0]["token_ids"] == greedy(prompt, NUM_TOKENS), f"prompt of {len(prompt)} tokens"
        cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
    return cached


def test_cold_warm_and_after_a_store_hit_in_chunks_of_16(mesh: Mesh) -> None:
    asked = prompts(32, 1, 400, salt=1)
    assert assert_exact(mesh, asked) == [0] * len(asked)
    warm = assert_exact(mesh, asked)
    assert warm == [(len(prompt) - 1) // 16 * 16 for prompt in asked]
    mesh.wait_idle()
    # both pools are emptied, so whatever is cached now comes out of the store
    mesh.kill_and_wait_for_return("prefill-0", "decode-0")
    from_store = assert_exact(mesh, asked)
    assert from_store == warm
    assert mesh.metric("prefill-0", "weft_prefix_cache_hit_tokens_total", tier="dram") > 0


def test_chunks_of_64_with_two_workers_of_each_role() -> None:
    running = Mesh(
        "--transport", "mooncake", "--prefill", "2", "--decode", "2", environment={"WEFT_CHUNK_TOKENS": "64"}
    )
    try:
        running.wait_ready()
        asked = prompts(32, 1, 400, salt=2)
        assert_exact(running, asked)
        assert_exact(running, asked)
        running.wait_idle()
    finally:
        running.stop()


def test_the_grpc_fallback_gives_the_same_tokens() -> None:
    running = Mesh("--transport", "grpc", environment={"WEFT_CHUNK_TOKENS": "64"})
    try:
        running.wait_ready()
        assert_exact(running, prompts(8, 5, 300, salt=3))
        assert running.metric("decode-0", "weft_kv_transfer_bytes_total", transport="grpc") > 0
        assert running.metric("decode-0", "weft_kv_transfer_bytes_total", transport="mooncake") == 0
    finally:
        running.stop()


def test_embeddings_are_the_means_of_transformers_hidden_states(mesh: Mesh) -> None:
    asked = prompts(6, 1, 300, salt=4)
    complete(mesh, asked[-1])  # what is cached changes nothing
    reply = mesh.client.post("/v1/embeddings", json={"model": "weft-nano", "input": asked})
    assert reply.status_code == 200, reply.text
    answer = reply.json()
    assert answer["usage"]["prompt_tokens"] == sum(map(len, asked))
    for prompt, entry in zip(asked, answer["data"], strict=True):
        assert entry["embedding"] == pytest.approx(mean_hidden(prompt), abs=1e-4)
