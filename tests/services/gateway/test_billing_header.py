"""The billing line of an agent's system prompt is removed before rendering, counting and caching."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.services.gateway.conftest import END, MODEL_NAME, MakeBench
from tests.services.gateway.fakes import speaking
from weft_services.gateway.dialects.anthropic_requests import parse_messages
from weft_services.gateway.dialects.openai_requests import parse_chat
from weft_services.gateway.dialects.responses_requests import parse_responses
from weft_services.gateway.dialects.token_requests import parse_tokenize
from weft_services.gateway.generation import Conversation

LINE = "x-anthropic-billing-header: cc_version=2.1.197.abc; cc_entrypoint=cli; cch=0f3a1;"
RULES = "You are an agent. x=1; keep to it."
USER: dict[str, Any] = {"role": "user", "content": "hi"}


def block(text: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": text, **more}


def messages_of(parse: Callable[[bytes], Any], **fields: Any) -> tuple[dict[str, Any], ...]:
    asked = parse(json.dumps({"model": "m", **fields}).encode())
    prompt = asked.prompts[0] if hasattr(asked, "prompts") else asked.prompt
    assert isinstance(prompt, Conversation)
    return prompt.messages


@pytest.mark.parametrize(
    "system",
    [
        [block(LINE), block(RULES)],
        [block(LINE), block(RULES, cache_control={"type": "ephemeral"})],
        [block(f"{LINE}\n"), block(RULES)],
        f"{LINE}\n{RULES}",
        f"{LINE}\r\n\r\n{RULES}",
        LINE + RULES,
        f"{LINE} cc_workload=cron;\n{RULES}",
        f"{LINE.removesuffix(';')}\n{RULES}",
        f"{LINE.rpartition('cch')[0]}\n{RULES}",
        RULES,
    ],
)
def test_billing_header_is_dropped_in_messages(system: Any) -> None:
    said = messages_of(parse_messages, max_tokens=1, system=system, messages=[USER])
    assert said == ({"role": "system", "content": RULES}, USER)


def test_billing_header_alone_leaves_no_system_message() -> None:
    assert messages_of(parse_messages, max_tokens=1, system=LINE, messages=[USER]) == (USER,)
    assert messages_of(parse_chat, messages=[{"role": "system", "content": LINE}]) == (
        {"role": "system", "content": ""},
    )


@pytest.mark.parametrize("role", ["system", "developer"])
@pytest.mark.parametrize("content", [f"{LINE}\n{RULES}", [block(LINE), block(RULES)]])
def test_billing_header_is_dropped_in_chats(role: str, content: Any) -> None:
    given = [{"role": role, "content": content}, USER]
    for parse in (parse_chat, parse_tokenize):
        assert messages_of(parse, messages=given) == ({"role": role, "content": RULES}, USER)


@pytest.mark.parametrize(
    "fields",
    [
        {"instructions": f"{LINE}\n{RULES}", "input": "hi"},
        {"input": [{"role": "developer", "content": f"{LINE}\n{RULES}"}, USER]},
        {"input": [{"role": "system", "content": [{"type": "input_text", "text": LINE + RULES}]}, USER]},
        {"instructions": LINE, "input": [{"role": "developer", "content": RULES}, USER]},
    ],
)
def test_billing_header_is_dropped_in_responses(fields: dict[str, Any]) -> None:
    said = messages_of(parse_responses, **fields)
    assert [message["content"] for message in said] == [RULES, "hi"]


@pytest.mark.parametrize(
    "text",
    [
        "x-anthropic-billing-header: what is this line for?",
        "x-anthropic-billing-header:\nRules",
        f"Explain:\n{LINE}",
        f" {LINE}",
        LINE.replace("billing-header", "beta"),
        "Today's date: 2026-11-28.\nRules",
    ],
)
def test_other_text_stays(text: str) -> None:
    assert messages_of(parse_messages, max_tokens=1, system=text, messages=[USER])[0]["content"] == text


def test_billing_header_stays_outside_the_system_prompt() -> None:
    said = [{"role": "user", "content": LINE}, {"role": "system", "content": LINE}, {"role": "user", "content": LINE}]
    assert messages_of(parse_chat, messages=said) == tuple(said)


async def test_changing_line_changes_no_block(bench: MakeBench) -> None:
    async with bench() as b:
        b.decode.script = speaking([*b.ids("hello"), END])
        counts = []
        for place, cch in enumerate(("00000", "fffff")):
            system = [block(LINE.replace("0f3a1", cch)), block(RULES)] if place else RULES
            body = {"model": MODEL_NAME, "max_tokens": 4, "system": system, "messages": [USER]}
            assert (await b.http.post("/v1/messages", json=body)).status_code == 200
            counts.append((await b.http.post("/v1/messages/count_tokens", json=body)).json())
        first, second = (list(started.token_ids) for started in b.decode.started)
        assert (first, counts[0]) == (second, counts[1])
