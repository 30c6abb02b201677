"""Requests of many kinds to an OpenAI server, and answers that can be compared: text, tokens, logprobs, ends, usage."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

from loadtest.openai_client import events

# a batch of other shapes adds up in another order
LOGPROB_TOLERANCE = 2e-3
EXTRA: dict[str, dict[str, Any]] = {
    "logprobs": {"logprobs": 2},
    "stop": {"stop": [" the", "er "]},
    "two choices": {"n": 2},
}


@dataclass(frozen=True, slots=True)
class Ask:
    """One request."""

    name: str
    body: dict[str, Any]


@dataclass(slots=True)
class Choice:
    """One choice, put together from its pieces."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None


@dataclass(slots=True)
class Answer:
    """What came, and when: to a stream's first piece, and the longest silence between two. `error` when it broke."""

    choices: dict[int, Choice] = field(default_factory=dict)
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    first_seconds: float = 0.0
    longest_gap: float = 0.0
    error: str = ""


def make_asks(text: str, count: int, prompt_words: int, max_tokens: int, seed: int) -> list[Ask]:
    """Greedy and seeded, with logprobs, stop strings, two choices, and one in eight not streamed."""
    dice, words, asks = random.Random(seed), text.split(), []
    for index in range(count):
        start = dice.randrange(len(words) - prompt_words)
        body: dict[str, Any] = {
            "prompt": f"{index} " + " ".join(words[start : start + dice.randint(prompt_words // 3, prompt_words)]),
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "return_token_ids": True,
            "temperature": 0.0 if index % 2 else 0.8,
            "seed": 1000 + index,
        }
        kind = ("plain", "logprobs", "stop", "two choices")[index // 2 % 4]
        is_streamed = index % 8 != 7
        body |= EXTRA.get(kind, {})
        body |= {"stream": True, "stream_options": {"include_usage": True}} if is_streamed else {}
        asks.append(Ask(f"{index} ({kind}{'' if is_streamed else ', not streamed'})", body))
    return asks


async def ask(client: httpx.AsyncClient, request: Ask, on_piece: Callable[[], None] = lambda: None) -> Answer:
    """To its end; failures are told in the answer. `on_piece` is called when something of a stream has come."""
    answer, began = Answer(), time.perf_counter()
    body = {"model": "weft-nano", **request.body}
    try:
        if not body.get("stream"):
            response = await client.post("/v1/completions", json=body)
            _read(response.json(), answer)
        else:
            async with client.stream("POST", "/v1/completions", json=body) as response:
                await _read_stream(response, answer, began, on_piece)
    except (httpx.HTTPError, ValueError) as error:
        answer.error = f"{type(error).__name__}: {error}"
    if not answer.error and not all(choice.finish_reason for choice in answer.choices.values()):
        answer.error = "a choice has no end"
    if not answer.error and not answer.completion_tokens:
        answer.error = f"no usage; HTTP {response.status_code}"
    return answer


async def _read_stream(response: httpx.Response, answer: Answer, began: float, on_piece: Callable[[], None]) -> None:
    if response.status_code != httpx.codes.OK:
        answer.error = f"HTTP {response.status_code}: {(await response.aread())[:200]!r}"
        return
    last = began
    async for arrived in events(response):
        now = time.perf_counter()
        if not any(event.get("choices") for event in arrived):
            pass
        elif answer.first_seconds:
            answer.longest_gap = max(answer.longest_gap, now - last)
        else:
            answer.first_seconds = now - began
        last = now
        for event in arrived:
            _read(event, answer)
            on_piece()


def _read(event: dict[str, Any], answer: Answer) -> None:
    if "error" in event:
        answer.error = str(event["error"].get("message"))
    for piece in event.get("choices", ()):
        choice = answer.choices.setdefault(piece["index"], Choice())
        choice.text += piece["text"]
        choice.tokens += piece.get("token_ids") or []
        choice.logprobs += (piece.get("logprobs") or {}).get("token_logprobs") or []
        choice.finish_reason = piece["finish_reason"] or choice.finish_reason
    if usage := event.get("usage"):
        answer.prompt_tokens, answer.completion_tokens = usage["prompt_tokens"], usage["completion_tokens"]
        answer.cached_tokens = usage["prompt_tokens_details"]["cached_tokens"]


def difference(expected: Answer, answer: Answer) -> str:
    """What an undisturbed answer has otherwise; empty when nothing. Cached tokens may differ, within the prompt."""
    for index, want in expected.choices.items():
        have = answer.choices.get(index, Choice())
        for name in ("tokens", "text", "finish_reason"):
            if getattr(want, name) != getattr(have, name):
                return f"choice {index}: {name} {getattr(have, name)!r} instead of {getattr(want, name)!r}"
        if len(want.logprobs) != len(have.logprobs):
            return f"choice {index}: {len(have.logprobs)} logprobs instead of {len(want.logprobs)}"
        if any(abs(a - b) > LOGPROB_TOLERANCE for a, b in zip(want.logprobs, have.logprobs, strict=True)):
            return f"choice {index}: other logprobs"
    counts = [(each.prompt_tokens, each.completion_tokens) for each in (expected, answer)]
    if counts[0] != counts[1]:
        return f"prompt and completion tokens {counts[1]} instead of {counts[0]}"
    if answer.cached_tokens > answer.prompt_tokens:
        return f"{answer.cached_tokens} cached tokens of {answer.prompt_tokens}"
    return ""
