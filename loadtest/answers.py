"""The streaming client of fault tests: requests of many kinds, and answers to compare, with the times of their pieces.

Rates and latencies under load are measured with the client of `weft bench` (`weft.bench.load`).
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from loadtest.processes import ROOT, BenchError

DONE = "[DONE]"
# longer than a request waits for a worker to be missed, started again and filled
HUNG_SECONDS = 180.0
# a batch of another shape adds in another order
LOGPROB_TOLERANCE = 2e-3
EXTRA: dict[str, dict[str, Any]] = {
    "logprobs": {"logprobs": 2},
    "stop": {"stop": [" the", "er "]},
    "two choices": {"n": 2},
}


@dataclass(frozen=True, slots=True)
class Ask:
    name: str
    body: dict[str, Any]


@dataclass(slots=True)
class Choice:
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None


@dataclass(slots=True)
class Answer:
    """An answer, the seconds to a stream's first piece, and the longest silence between two; `error` if it broke."""

    choices: dict[int, Choice] = field(default_factory=dict)
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    first_seconds: float = 0.0
    longest_gap: float = 0.0
    error: str = ""


@asynccontextmanager
async def client_of(url: str) -> AsyncIterator[httpx.AsyncClient]:
    """Open a client with as many connections as are asked for."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=HUNG_SECONDS, limits=limits) as client:
        yield client


def repository_text() -> str:
    """Return the prose of this repository, white space folded."""
    files = [*sorted(ROOT.glob("docs/**/*.md")), ROOT / "README.md", ROOT / "LICENSE"]
    return " ".join(" ".join(file.read_text() for file in files if file.exists()).split())


def make_asks(text: str, count: int, prompt_words: int, max_tokens: int, seed: int) -> list[Ask]:
    """Return greedy and seeded requests, with logprobs, stop strings, two choices, and one in eight not streamed."""
    dice, words, asks = random.Random(seed), text.split(), []
    for index in range(count):
        start = dice.randrange(len(words) - prompt_words)
        body: dict[str, Any] = {
            "prompt": f"{index} " + " ".join(words[start : start + dice.randint(prompt_words // 3, prompt_words)]),
            "max_tokens": max_tokens,
            "return_token_ids": True,
            "temperature": 0.0 if index % 2 else 0.8,
            "seed": 1000 + index,
            "stream": index % 8 != 7,
        }
        kind = ("plain", "logprobs", "stop", "two choices")[index // 2 % 4]
        asks.append(Ask(f"{index} ({kind}{'' if body['stream'] else ', not streamed'})", body | EXTRA.get(kind, {})))
    return asks


async def ask(
    client: httpx.AsyncClient,
    request: Ask,
    on_piece: Callable[[], None] = lambda: None,
    headers: Mapping[str, str] | None = None,
) -> Answer:
    """Send a completion and read it to its end; failures are in the answer. `on_piece` is called for each event."""
    answer, began, status = Answer(), time.perf_counter(), 0
    body = {"model": "weft-nano", "ignore_eos": True, **request.body}
    body |= {"stream_options": {"include_usage": True}} if body.get("stream") else {}
    try:
        async with client.stream("POST", "/v1/completions", json=body, headers=headers) as response:
            status = response.status_code
            if status != httpx.codes.OK:
                answer.error = f"HTTP {status}: {(await response.aread())[:200]!r}"
            elif not body.get("stream"):
                _read(json.loads(await response.aread()), answer)
            else:
                await _read_stream(response, answer, began, on_piece)
    except (httpx.HTTPError, ValueError) as error:
        answer.error = f"{type(error).__name__}: {error}"
    if not answer.error and not all(choice.finish_reason for choice in answer.choices.values()):
        answer.error = "a choice has no end"
    if not answer.error and not answer.completion_tokens:
        answer.error = f"no usage; HTTP {status}"
    return answer


async def expected_answers(client: httpx.AsyncClient, asks: Sequence[Ask]) -> list[Answer]:
    """Ask everything once, undisturbed: these answers are the oracle. Raises BenchError when one fails."""
    expected = [await ask(client, each) for each in asks]
    if broken := [answer.error for answer in expected if answer.error]:
        raise BenchError(f"undisturbed requests fail: {broken[0]}")
    return expected


async def _read_stream(response: httpx.Response, answer: Answer, began: float, on_piece: Callable[[], None]) -> None:
    last = began
    async for line in response.aiter_lines():
        data = line.removeprefix("data:").strip()
        if not line.startswith("data:") or data == DONE:
            continue
        event, now = json.loads(data), time.perf_counter()
        if not event.get("choices"):
            pass
        elif answer.first_seconds:
            answer.longest_gap = max(answer.longest_gap, now - last)
        else:
            answer.first_seconds = now - began
        last = now
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
    """Return how an answer differs from the undisturbed one, or "". Cached tokens may differ, within the prompt."""
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
