"""Random JSON schemas through a whole mesh: `python -m loadtest.gateway.constrained --count 1000`.

Half of the answers are streamed. A finished answer must validate with `jsonschema`; answers that `--max-tokens` cut off
are counted and not judged. Without `--url` it starts a mesh.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import time
from collections import Counter
from collections.abc import Iterator
from random import Random
from typing import Any

import jsonschema  # type: ignore[import-untyped]
from openai import AsyncOpenAI, OpenAIError
from tests.grammars.schemas import random_schema

from loadtest.local_mesh import LocalMesh
from loadtest.report import machine, table, verdict

CONCURRENCY = 16
QUESTIONS = ("Where does the river go?", "Tell me about Ann and her dog.", "Give me some JSON.")


async def ask(client: AsyncOpenAI, model: str, number: int, schema: dict[str, Any], max_tokens: int) -> tuple[str, str]:
    """Return the answer and its finish reason; every second one is streamed."""
    form: Any = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}
    fields: dict[str, Any] = {
        "model": model,
        "messages": [{"role": "user", "content": QUESTIONS[number % len(QUESTIONS)]}],
        "response_format": form,
        "max_tokens": max_tokens,
        "seed": number,
    }
    if number % 2:
        choice = (await client.chat.completions.create(**fields)).choices[0]
        return choice.message.content or "", choice.finish_reason
    text, reason = "", ""
    async for chunk in await client.chat.completions.create(**fields, stream=True):
        text += chunk.choices[0].delta.content or ""
        reason = chunk.choices[0].finish_reason or reason
    return text, reason


async def judge(client: AsyncOpenAI, model: str, number: int, options: argparse.Namespace) -> str:
    """Return the outcome of one schema."""
    schema = random_schema(Random(f"{options.seed}-{number}"))
    try:
        text, reason = await ask(client, model, number, schema, options.max_tokens)
    except OpenAIError as error:
        print(f"schema {number}: {error}\n  {json.dumps(schema)}")
        return "failed"
    if reason != "stop":
        return "cut off"
    try:
        jsonschema.validate(json.loads(text), schema, format_checker=jsonschema.FormatChecker())
    except (ValueError, jsonschema.ValidationError) as error:
        print(f"schema {number}: {error}\n  {json.dumps(schema)}\n  {text}")
        return "INVALID"
    return "valid"


async def run(url: str, options: argparse.Namespace) -> Counter[str]:
    """Ask with all schemas, CONCURRENCY at a time; return the outcomes."""
    places, counts = asyncio.Semaphore(CONCURRENCY), Counter[str]()
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=300) as client:
        model = (await client.models.list()).data[0].id

        async def one(number: int) -> None:
            async with places:
                counts[await judge(client, model, number, options)] += 1

        await asyncio.gather(*(one(number) for number in range(options.count)))
    return counts


@contextlib.contextmanager
def mesh_at(url: str) -> Iterator[str]:
    """Yield the given URL, or that of a new mesh."""
    if url:
        yield url
        return
    with LocalMesh(num_prefill=1, num_decode=1) as mesh:
        yield mesh.url


def main() -> None:
    """Ask, judge and print; exit with 1 when an answer is invalid or failed."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.gateway.constrained", description=__doc__)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--max-tokens", type=int, default=400)
    parser.add_argument("--url", default="", help="of a gateway")
    options = parser.parse_args()
    with mesh_at(options.url) as url:
        began = time.perf_counter()
        counts = asyncio.run(run(url, options))
    finished = counts["valid"] + counts["INVALID"]
    share = counts["valid"] / max(1, finished)
    row = (options.count, finished, f"{share:.2%}", counts["cut off"], counts["failed"])
    print(f"{machine()}, {time.perf_counter() - began:.0f} s\n")
    print(table(("schemas", "finished", "of these valid", "cut off", "failed"), [row]))
    is_met = share == 1 and not counts["failed"]
    print(f"\n{verdict(is_met, '100 %')}")
    raise SystemExit(not is_met)


if __name__ == "__main__":
    main()
