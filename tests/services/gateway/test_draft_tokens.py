"""Streams that tell draft tokens from others: stream_options.include_draft_tokens."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from tests.services.gateway.conftest import END, MODEL_NAME, Bench, MakeBench
from tests.services.gateway.test_prediction import EXPECTED, drafting
from weft.metrics import REGISTRY
from weft.request import DraftCounts, FinishReason, RequestKey
from weft_services.gateway.front import request_record
from weft_services.gateway.mesh.choice_text import ChoiceText, ChoiceUpdate
from weft_services.gateway.mesh.decode_connection import SequenceUpdate
from weft_services.gateway.text.codec import Codec

NUM_ACCEPTED = 4
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
BODIES: dict[str, dict[str, Any]] = {
    "chat/completions": {"messages": [{"role": "user", "content": "hello"}]},
    "completions": {"prompt": "hello"},
}


async def choices_of(b: Bench, path: str, is_asked: bool = True, **fields: Any) -> list[dict[str, Any]]:
    """Return the choices of all chunks that have one."""
    options = {"stream_options": {"include_draft_tokens": True}} if is_asked else {}
    body = {"model": MODEL_NAME, "stream": True, **BODIES[path], **options, **fields}
    response = await b.http.post(f"/v1/{path}", json=body)
    events = [json.loads(each[6:]) for each in response.text.split("\n\n") if each.startswith("data: {")]
    return [choice for event in events for choice in event["choices"]]


def text_of(choice: dict[str, Any]) -> str:
    return str(choice.get("text") or choice.get("delta", {}).get("content") or "")


def tokens_of(logprobs: dict[str, Any]) -> list[str]:
    return [entry["token"] for entry in logprobs["content"]] if "content" in logprobs else logprobs["tokens"]


def by_kind(choices: list[dict[str, Any]]) -> tuple[str, str]:
    """Return the text that came from drafts, and the other text."""
    texts = [(choice.get("is_draft", False), text_of(choice)) for choice in choices]
    return "".join(text for is_draft, text in texts if is_draft), "".join(
        text for is_draft, text in texts if not is_draft
    )


@pytest.mark.parametrize("fields", [{}, {"stop": ["#"]}, {"return_token_ids": True}], ids=["plain", "stop", "ids"])
@pytest.mark.parametrize("path", BODIES)
async def test_chunk_contains_drafts_or_other_tokens(bench: MakeBench, path: str, fields: dict[str, Any]) -> None:
    async with bench() as b:
        ids = b.ids(EXPECTED)
        b.decode.script = drafting([*ids, END], NUM_ACCEPTED)
        choices = await choices_of(b, path, **fields)
        first, step, rest = ids[:1], ids[1 : 1 + NUM_ACCEPTED], ids[1 + NUM_ACCEPTED :]
        drafted = b.tokenizer.decode(step)
        assert by_kind(choices) == (drafted, b.tokenizer.decode(first) + b.tokenizer.decode(rest))
        assert "".join(map(text_of, choices)) == EXPECTED
        if "return_token_ids" in fields:
            assert [each["token_ids"] for each in choices if each.get("is_draft")] == [step]


@pytest.mark.parametrize("path", BODIES)
async def test_logprobs_follow_their_tokens(bench: MakeBench, path: str) -> None:
    async with bench() as b:
        ids = b.ids(EXPECTED)
        b.decode.script = drafting([*ids, END], NUM_ACCEPTED)
        wanted = {"logprobs": True} if path == "chat/completions" else {"logprobs": 1}
        choices = await choices_of(b, path, **wanted)
        spelled = [
            (choice.get("is_draft", False), token)
            for choice in choices
            for token in tokens_of(choice["logprobs"] or {"tokens": []})
        ]
        texts = [b.tokenizer.decode([token_id], skip_special_tokens=False) for token_id in [*ids, END]]
        assert spelled == [(1 <= place <= NUM_ACCEPTED, text) for place, text in enumerate(texts)]


@pytest.mark.parametrize("path", BODIES)
async def test_stream_without_the_option_has_no_new_field(bench: MakeBench, path: str) -> None:
    async with bench() as b:
        b.decode.script = drafting([*b.ids(EXPECTED), END], NUM_ACCEPTED)
        choices = await choices_of(b, path, is_asked=False)
        known = {"index", "text" if path == "completions" else "delta", "logprobs", "finish_reason"}
        assert {frozenset(choice) for choice in choices} == {frozenset(known)}
        assert "".join(map(text_of, choices)) == EXPECTED
        # A step's tokens stay together: clients that do not ask get no more chunks than before.
        step = b.tokenizer.decode(b.ids(EXPECTED)[1 : NUM_ACCEPTED + 2])
        assert any(step in text_of(choice) for choice in choices)


async def test_tool_calls_are_not_marked_as_drafts(bench: MakeBench) -> None:
    async with bench(tool_format="hermes") as b:
        ids = b.ids(f"here: {CALL}")
        b.decode.script = drafting([*ids, END], num_accepted=len(ids) - 4)
        choices = await choices_of(b, "chat/completions", tools=TOOLS)
        calls = [choice for choice in choices if choice["delta"].get("tool_calls")]
        arguments = "".join(each["function"].get("arguments", "") for c in calls for each in c["delta"]["tool_calls"])
        assert json.loads(arguments) == {"a": 1}
        assert not any("is_draft" in choice for choice in calls)
        assert any(choice.get("is_draft") for choice in choices)
        assert choices[-1]["finish_reason"] == "tool_calls"


def update(ids: list[int], num_accepted: int, finish_reason: FinishReason | None = None) -> SequenceUpdate:
    counts = DraftCounts(verified=num_accepted + 1, accepted=num_accepted)
    return SequenceUpdate(RequestKey("r"), tuple(ids), finish_reason=finish_reason, drafts=counts)


@pytest.mark.parametrize("max_tokens", [1, 3, 5, 100])
@pytest.mark.parametrize("num_accepted", [0, 3, 5])
def test_separation_keeps_text_and_counts(tokenizer: Any, max_tokens: int, num_accepted: int) -> None:
    ids = list(
        tokenizer.encode("hello world, the answer").ids[:5]
    )  # a stop token may be the last draft; it has no text
    updates = [update(ids[:1], 0), update(ids, num_accepted, FinishReason.STOP), update(ids, 2)]
    whole, apart = (ChoiceText(0, Codec(tokenizer), None, max_tokens) for _ in range(2))
    expected, parts = whole.accept(updates), apart.accept_apart(updates)
    assert "".join(part.text for part in parts) == expected.text
    assert [token for part in parts for token in part.token_ids] == list(expected.token_ids)
    assert [part.finish_reason for part in parts] == [None] * (len(parts) - 1) + [expected.finish_reason]
    assert apart.drafts == whole.drafts
    assert sum(len(part.token_ids) for part in parts if part.is_draft) == whole.drafts.accepted


def test_latency_counts_all_pieces_of_a_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(request_record, "time", SimpleNamespace(monotonic=lambda: now, time=lambda: now))
    record = request_record.RequestRecord(request_record.ApiEndpoint.CHAT)
    record.set_model("drafting")
    record.on_pieces([ChoiceUpdate(0, "a", (1,), (), None)])
    now += 1.0
    record.on_pieces(
        [ChoiceUpdate(index, "b", ids, (), None) for index, ids in ((0, (1, 2, 3)), (0, (4,)), (1, (5, 6)))]
    )
    assert REGISTRY.get_sample_value("weft_inter_token_latency_seconds_sum", {"model": "drafting"}) == 0.25
