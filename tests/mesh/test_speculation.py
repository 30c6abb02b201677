"""Speculation through a whole mesh: the same answers, counted drafts, and metrics."""

from __future__ import annotations

from typing import Any

import pytest

from tests.mesh.conftest import Mesh

pytestmark = pytest.mark.timeout(300)
QUESTION = "Please count from one to twenty, and then say the colours of the rainbow."


def answer(mesh: Mesh, **fields: Any) -> tuple[str, dict[str, int]]:
    """Return the text, and the details of its completion tokens."""
    body = {"model": "weft-nano", "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 96, "seed": 7}
    reply = mesh.client.post("/v1/chat/completions", json=body | {"ignore_eos": True} | fields)
    assert reply.status_code == 200, reply.text
    completion = reply.json()
    return completion["choices"][0]["message"]["content"], completion["usage"]["completion_tokens_details"]


@pytest.mark.parametrize("temperature", [0, 0.7])
def test_prediction_is_accepted_and_changes_no_text(mesh: Mesh, temperature: float) -> None:
    plain, details = answer(mesh, temperature=temperature, speculation=False)
    assert (details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]) == (0, 0)
    before = mesh.metric("decode-0", "weft_spec_accepted_tokens_total", source="prediction")
    # A wrong word in the middle is rejected, and the rest is found again.
    words = plain.split(" ")
    words[len(words) // 2] = "xylophone"
    text, details = answer(mesh, temperature=temperature, prediction={"type": "content", "content": " ".join(words)})
    assert text == plain
    assert details["accepted_prediction_tokens"] > 16
    counted = mesh.metric("decode-0", "weft_spec_accepted_tokens_total", source="prediction") - before
    assert counted == details["accepted_prediction_tokens"]


def test_constrained_answer_is_the_same_with_drafts(mesh: Mesh) -> None:
    names = [f"field_{number}" for number in range(6)]
    schema = {"type": "object", "properties": {name: {"type": "integer"} for name in names}, "required": names}
    fields = {
        "response_format": {"type": "json_schema", "json_schema": {"name": "six", "schema": schema}},
        "temperature": 0.7,
        "ignore_eos": False,
    }
    before = mesh.metric("decode-0", "weft_spec_accepted_tokens_total", source="grammar")
    assert answer(mesh, **fields)[0] == answer(mesh, **fields, speculation=False)[0]
    assert mesh.metric("decode-0", "weft_spec_accepted_tokens_total", source="grammar") > before
