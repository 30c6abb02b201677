"""How long a client wants its prompt kept, in each API's words, as workers hear it."""

from __future__ import annotations

from typing import Any

import anthropic
import openai
import pytest
from anthropic import AsyncAnthropic

from tests.services.gateway.conftest import MODEL_NAME, Bench, MakeBench
from tests.services.gateway.fakes import speaking

IN_MEMORY, DAY, HOUR, MINUTES, AS_LONG_AS_POSSIBLE = (
    (3600, True),
    (86400, False),
    (3600, False),
    (300, False),
    (0, False),
)
USER: Any = {"role": "user", "content": "hello"}


def heard(b: Bench) -> tuple[int, bool]:
    retention = b.decode.started[-1].retention
    return retention.idle_seconds, retention.memory_only


@pytest.mark.parametrize(
    ("word", "expected"), [("in_memory", IN_MEMORY), ("24h", DAY), (openai.omit, AS_LONG_AS_POSSIBLE)]
)
async def test_openais_word_for_it(bench: MakeBench, word: Any, expected: tuple[int, bool]) -> None:
    async with bench() as b:
        b.decode.script = speaking(b.ids("hello"))
        chat, responses = b.client.chat.completions, b.client.responses
        await chat.create(model=MODEL_NAME, messages=[USER], prompt_cache_retention=word)
        assert heard(b) == expected
        answer = await responses.create(model=MODEL_NAME, input="hello", store=False, prompt_cache_retention=word)
        assert heard(b) == expected
        assert answer.prompt_cache_retention == (word or None)


async def test_a_word_that_is_none_of_openais_is_refused(bench: MakeBench) -> None:
    async with bench() as b:
        asked: Any = {"model": MODEL_NAME, "messages": [USER], "prompt_cache_retention": "for ever"}
        with pytest.raises(openai.BadRequestError, match="prompt_cache_retention") as caught:
            await b.client.chat.completions.create(**asked)
        assert caught.value.param == "prompt_cache_retention"


def marked(ttl: str | None) -> dict[str, Any]:
    return {"cache_control": {"type": "ephemeral"} | ({"ttl": ttl} if ttl else {})}


CASES: dict[str, tuple[dict[str, Any], tuple[int, bool]]] = {
    "nowhere": ({}, AS_LONG_AS_POSSIBLE),
    "for all": (marked("1h"), HOUR),
    "for a block": (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", **marked("5m")}]}]},
        MINUTES,
    ),
    "for the system prompt and all": (
        {"system": [{"type": "text", "text": "a", **marked("1h")}], **marked("5m")},
        HOUR,
    ),
    "for a tool": ({"tools": [{"name": "now", "input_schema": {"type": "object"}, **marked("1h")}]}, HOUR),
    "without a time": (
        {"system": [{"type": "text", "text": "a", **marked(None)}], **marked("5m")},
        AS_LONG_AS_POSSIBLE,
    ),
}


@pytest.mark.parametrize("case", CASES)
async def test_anthropics_cache_control(bench: MakeBench, case: str) -> None:
    fields, expected = CASES[case]
    async with bench() as b, AsyncAnthropic(base_url=b.url, api_key="none", max_retries=0, timeout=20) as sdk:
        b.decode.script = speaking(b.ids("hello"))
        asked: Any = {"model": MODEL_NAME, "max_tokens": 9, "messages": [USER], **fields}
        await sdk.messages.create(**asked)
        assert heard(b) == expected


@pytest.mark.parametrize(
    "mark", [marked("2h")["cache_control"], {"type": "ephemeral", "ttl": ["5m"]}, {"ttl": "5m"}, "5m"]
)
async def test_a_cache_control_that_anthropic_does_not_have_is_refused_with_its_place(
    bench: MakeBench, mark: Any
) -> None:
    async with bench() as b, AsyncAnthropic(base_url=b.url, api_key="none", max_retries=0, timeout=20) as sdk:
        system = [{"type": "text", "text": "a"}, {"type": "text", "text": "b", "cache_control": mark}]
        asked: Any = {"model": MODEL_NAME, "max_tokens": 9, "messages": [USER], "system": system}
        with pytest.raises(anthropic.BadRequestError, match=r"system\.1\.cache_control: expected type ephemeral"):
            await sdk.messages.create(**asked)
