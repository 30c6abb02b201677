"""Speculation through a whole mesh: the same answers, counted drafts, and metrics."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.mesh.conftest import Mesh

pytestmark = pytest.mark.timeout(300)
QUESTION = "Please count from one to twenty, and then say the colours of the rainbow."
PLACE = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 9}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "find_weather", "parameters": PLACE, "strict": True}}
TOP = {"logprobs": True, "top_logprobs": 3, "max_tokens": 48}
SAMPLED = {"temperature": 0.7, **TOP}
# what requests ask for, beyond a text
ASKED: dict[str, dict[str, Any]] = {
    "three answers": {"n": 3, **SAMPLED},
    "minimum probability": {"min_p": 0.05, **SAMPLED, "temperature": 1.2},
    "nucleus": {"top_p": 0.9, **SAMPLED, "temperature": 1.2},
    "penalties": {"frequency_penalty": 0.4, "presence_penalty": 0.3, "repetition_penalty": 1.2, **SAMPLED},
    "bias": {"logit_bias": {"40": 3, "100": -100}, **SAMPLED},
    "regex": {"guided_regex": r"(/[a-z]{2,5}){1,4}/\d{1,9}\.txt", "ignore_eos": False, **SAMPLED},
    "tool call": {"tools": [TOOL], "tool_choice": "required", "ignore_eos": False, **SAMPLED},
}


def complete(mesh: Mesh, **fields: Any) -> dict[str, Any]:
    """Return the whole completion."""
    body = {"model": "weft-nano", "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 96, "seed": 7}
    reply = mesh.client.post("/v1/chat/completions", json=body | {"ignore_eos": True} | fields)
    assert reply.status_code == 200, reply.text
    completion: dict[str, Any] = reply.json()
    return completion


def answer(mesh: Mesh, **fields: Any) -> tuple[str, dict[str, int]]:
    """Return the text, and the details of its completion tokens."""
    completion = complete(mesh, **fields)
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


def test_no_field_makes_drafts_show(mesh: Mesh) -> None:
    """Choices are equal with their logprobs, reasons and calls, one request at a time and all at once."""
    text = answer(mesh, temperature=0, speculation=False)[0]  # from now on the cache has most prompts
    asked = ASKED | {"stop string": {"temperature": 0, "stop": [text[len(text) // 3 :][:6]], **TOP}}
    plain: dict[str, list[Any]] = {}
    for name, fields in asked.items():
        complete(mesh, **fields)
        plain[name] = choices_of(complete(mesh, **fields, speculation=False))
    assert plain["stop string"][0]["finish_reason"] == "stop"
    assert plain["tool call"][0]["message"]["tool_calls"]
    before = drafted(mesh)
    for name, fields in asked.items():
        prediction = {"type": "content", "content": plain[name][0]["message"]["content"] or ""}
        for more in {}, {"prediction": prediction}:
            assert choices_of(complete(mesh, **fields, **more)) == plain[name], name
    with ThreadPoolExecutor(len(asked)) as threads:
        found = threads.map(lambda fields: choices_of(complete(mesh, **fields)), asked.values())
        assert list(found) == list(plain.values())
    assert drafted(mesh) > before


def choices_of(completion: dict[str, Any]) -> list[Any]:
    """Return the choices, with the random ids of their tool calls removed."""
    for choice in completion["choices"]:
        for call in choice["message"].get("tool_calls") or ():
            del call["id"]
    return list(completion["choices"])


def drafted(mesh: Mesh) -> float:
    sources = "grammar", "prediction", "copy", "head"
    return sum(mesh.metric("decode-0", "weft_spec_accepted_tokens_total", source=each) for each in sources)
