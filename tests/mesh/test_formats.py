"""Constrained answers on the real mesh, first tokens from prefill: every one matches, streamed or not, side by side."""

from __future__ import annotations

import asyncio
import json
import re
from random import Random
from typing import Any

import jsonschema  # type: ignore[import-untyped]
from openai import AsyncOpenAI

from tests.grammars.schemas import random_schema
from tests.mesh.conftest import Mesh

USER: Any = {"role": "user", "content": "Where does the river go?"}


def asker(mesh: Mesh) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{mesh.url}/v1", api_key="none", max_retries=0, timeout=60)


async def ask(client: AsyncOpenAI, schema: dict[str, Any], seed: int, stream: bool) -> tuple[str, str | None]:
    fields: dict[str, Any] = {
        "model": "weft-nano",
        "messages": [USER],
        "response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}},
        "seed": seed,
        "max_tokens": 400,
    }
    if not stream:
        choice = (await client.chat.completions.create(**fields)).choices[0]
        return choice.message.content or "", choice.finish_reason
    text, reason = "", None
    async for chunk in await client.chat.completions.create(**fields, stream=True):
        text += chunk.choices[0].delta.content or ""
        reason = chunk.choices[0].finish_reason or reason
    return text, reason


async def test_finished_answers_validate_streamed_and_not(mesh: Mesh) -> None:
    random = Random(11)
    schemas = [random_schema(random) for _ in range(12)]
    async with asker(mesh) as client:
        tasks = [ask(client, schema, i, stream=bool(i % 2)) for i, schema in enumerate(schemas)]
        answers = await asyncio.gather(*tasks)
    finished = [(text, schema) for (text, reason), schema in zip(answers, schemas, strict=True) if reason == "stop"]
    assert len(finished) >= 9
    for text, schema in finished:
        jsonschema.validate(json.loads(text), schema)


async def test_the_first_token_from_prefill_is_masked_too(mesh: Mesh) -> None:
    before = mesh.metric("decode-0", "weft_kv_transfer_bytes_total")
    async with asker(mesh) as client:
        answer = await client.completions.create(
            model="weft-nano",
            prompt="Once upon a time there was a small mesh that " * 4,
            max_tokens=64,
            n=2,
            seed=1,
            extra_body={"guided_regex": r"#[0-9]{4}(-[xyz]{3}){2}"},
        )
    assert [choice.finish_reason for choice in answer.choices] == ["stop", "stop"]
    for choice in answer.choices:
        assert re.fullmatch(r"#[0-9]{4}(-[xyz]{3}){2}", choice.text)
    assert mesh.metric("decode-0", "weft_kv_transfer_bytes_total") > before
    mesh.wait_idle()
