"""Grammars that would take seconds to compile, or all memory: `python -m loadtest.gateway.adversarial_grammars`.

Each goes to a gateway over HTTP, one at a time. The table has the median and longest time to the rejection; the bar is
50 ms. An accepted grammar must be harmless: the table has its longest mask.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import httpx
import orjson

from loadtest.engine.masks import follow
from loadtest.gateway.stacks import MODEL, Stack, weft
from loadtest.processes import Processes
from loadtest.report import machine, table, verdict
from weft_services.gateway.dialects.openai_requests import parse_chat
from weft_services.gateway.mesh.prepare import prepare
from weft_services.gateway.model import ServedModel, load_model

BAR_MS = 50.0
ANSWER_TOKENS = 128


def doubling(start: str, sign: str, name: str) -> str:
    """Return a grammar of a text of 2^60 letters."""
    rules = "\n".join(f"{name}{i}{sign} {name}{i + 1} {name}{i + 1}" for i in range(60))
    return f'{start}{name}0\n{rules}\n{name}60{sign} "x"'


def unions(width: int, depth: int) -> dict[str, Any]:
    """Return a schema with every combination of properties."""
    either = [
        {"anyOf": [{"properties": {f"p{i}{j}": {"type": "integer"}}} for j in range(width)]} for i in range(depth)
    ]
    return {"allOf": either}


def nested(levels: int) -> dict[str, Any]:
    """Return a schema nested `levels` deep."""
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


BOMBS: dict[str, dict[str, Any]] = {
    "counted repetition of counted repetitions": {"guided_regex": "((a{1,1000}){1,1000}){1,1000}"},
    "an expression with 2,000 brackets": {"guided_regex": "(" * 2000 + "a" + ")" * 2000},
    "a state for each subset of 24 places": {"guided_regex": "(a|b)*a(a|b){200}(a|b)*b(a|b){200}c"},
    "all that is not a long thing": {"guided_regex": "~((.*a.{24}))"},
    "look-around": {"guided_regex": "(?=a)b"},
    "doubling terminals": {"guided_grammar": doubling("start: ", ":", "R")},
    "doubling rules": {"guided_grammar": doubling("root ::= ", " ::=", "r")},
    "3,000 brackets": {"guided_grammar": "root ::= " + "(" * 3000 + '"a"' + ")" * 3000},
    "10,000 alternatives": {
        "guided_grammar": "start: " + " | ".join(f'"{number}x"' for number in range(10_000)) + " %%"
    },
    "no grammar": {"guided_grammar": "start: %%%"},
    "remainders that multiply": {
        "guided_json": {"allOf": [{"type": "integer", "multipleOf": 997}, {"multipleOf": 991}]}
    },
    "unions of unions": {"guided_json": unions(6, 8)},
    "3,000 properties": {"guided_json": {"properties": {f"p{i}": {} for i in range(3000)}}},
    "a schema of 100 levels": {"guided_json": nested(100)},
    "references in a circle": {"guided_json": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}},
    "an array of at least 10^9": {"guided_json": {"type": "array", "items": {"type": "integer"}, "minItems": 10**9}},
    "a string of at least 10^9": {"guided_json": {"type": "string", "minLength": 10**9}},
    "a pattern of counted repetitions": {"guided_json": {"type": "string", "pattern": "^((a{1,999}){1,999}){1,999}$"}},
    "a remote schema": {"guided_json": {"$ref": "http://example.com/schema"}},
    "a keyword that cannot be kept": {"guided_json": {"type": "array", "uniqueItems": True}},
}


def ask(client: httpx.Client, stack: Stack, fields: dict[str, Any]) -> tuple[int, float]:
    """Return the status, and milliseconds to it."""
    body = {"model": stack.model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, **fields}
    began = time.perf_counter()
    status = client.post("/v1/chat/completions", json=body).status_code
    return status, (time.perf_counter() - began) * 1000


def longest_mask(model: ServedModel, fields: dict[str, Any]) -> float:
    """Return the milliseconds of the longest mask over an answer."""
    body = orjson.dumps({"model": model.name, "messages": [{"role": "user", "content": "hi"}], **fields})
    prepared = prepare(parse_chat(body), model, None, model.max_context_tokens)
    grammar = prepared.sequences[0].sampling.grammar
    assert grammar is not None
    return max(follow(model.grammars.compile(grammar.text), model.vocabulary_size, ANSWER_TOKENS)) * 1000


def measure(stack: Stack, times: int) -> list[tuple[str, ...]]:
    """Return the rows of the table."""
    rows, model = list[tuple[str, ...]](), load_model(MODEL, MODEL.name)
    with httpx.Client(base_url=f"http://127.0.0.1:{stack.port}", timeout=60) as client:
        ask(client, stack, {"guided_regex": "a"})
        for name, fields in BOMBS.items():
            answers = [ask(client, stack, fields) for _ in range(times)]
            statuses = ", ".join(str(status) for status in sorted({status for status, _ in answers}))
            took = [milliseconds for _, milliseconds in answers]
            found = "yes" if statuses == "400" and statistics.median(took) <= BAR_MS else "NO"
            if statuses == "200":
                found = f"harmless: a mask takes {longest_mask(model, fields):.2f} ms at most"
            rows.append((name, statuses, f"{statistics.median(took):.1f} ms", f"{max(took):.1f} ms", found))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m loadtest.gateway.adversarial_grammars", description=__doc__)
    parser.add_argument("--times", type=int, default=10)
    options = parser.parse_args()
    with Processes() as processes:
        rows = measure(weft(1)(processes, 100.0), options.times)
    headings = (f"{options.times} times", "status", "median", "longest", f"rejected within {BAR_MS:.0f} ms")
    print(f"{machine()}\n\n{table(headings, rows)}\n")
    print(verdict(all(row[-1] != "NO" for row in rows), f"{BAR_MS:.0f} ms"))


if __name__ == "__main__":
    main()
