"""What the page is told of a real mesh: numbers that add up, and a hand-off when there was one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from tests.mesh.conftest import Mesh

PROMPT = "Of all the tales that the harbour told, this one was about a clock that went backwards. " * 4


def ask(mesh: Mesh, text: str) -> dict[str, Any]:
    """The timeline of an answer."""
    body = {"model": "weft-nano", "messages": [{"role": "user", "content": text}], "max_tokens": 8, "ignore_eos": True}
    answer = mesh.client.post("/v1/chat/completions", json=body, headers={"x-weft-timeline": "1"})
    assert answer.status_code == 200, answer.text
    told: dict[str, Any] = json.loads(answer.headers["x-weft-timeline"])
    assert told["tokens"]["cached"] == answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return told


def pictures(mesh: Mesh) -> Iterator[dict[str, Any]]:
    """The fleet as it comes, until the test's time is over."""
    name = ""
    with mesh.client.stream("GET", "/weft/fleet/events") as response:
        for line in response.iter_lines():
            if line.startswith("event: "):
                name = line[7:]
            elif line.startswith("data: ") and name == "fleet":
                yield json.loads(line[6:])


def test_the_stages_of_an_answer_fit_between_routing_and_the_first_token(mesh: Mesh) -> None:
    told = ask(mesh, PROMPT)
    assert told["workers"] == {"prefill": "prefill-0", "decode": "decode-0"}
    at, spent = told["elapsed_ms"], told["decode_stages_ms"]
    assert spent["prefilling"] > 0
    # the first token is told before the last block has come
    assert at["routed"] + spent["routed"] + spent["reserved"] + spent["prefilling"] <= at["first_token"] + 0.1
    assert spent["transferring"] > 0
    assert told["prefill"]["compute_ms"] <= spent["prefilling"] + spent["reserved"] + 1
    assert told["transfer"]["bytes"] > 0


def test_the_fleet_tells_what_its_workers_have_counted(mesh: Mesh) -> None:
    moved = ask(mesh, "Something else: " + PROMPT)["transfer"]["bytes"]
    again = ask(mesh, "Something else: " + PROMPT)
    assert again["tokens"]["cached"] > 0
    # reports of workers and pictures of the fleet come once a second each
    for fleet in pictures(mesh):
        workers = {worker["id"]: worker for worker in fleet["workers"]}
        tallies = workers["decode-0"]["hand_offs"]
        has_moved = any(each["prefill_worker_id"] == "prefill-0" and each["size_bytes"] >= moved for each in tallies)
        has_found = any(worker["prefix"]["pool_tokens"] > 0 for worker in workers.values())
        if has_moved and has_found and fleet["store"]:
            break
    assert workers["prefill-0"]["prefix"]["looked_up_tokens"] >= again["tokens"]["prompt"]
    for worker in workers.values():
        blocks = worker["blocks"]
        assert blocks["total"] == sum(blocks[state] for state in ("active", "cached", "quarantined", "free"))
    assert fleet["store"]["memory_bytes"] > 0
