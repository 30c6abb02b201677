"""A client of OpenAI servers that measures: one streamed completion, and when its pieces came."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx

SILENCE_SECONDS = 120.0
CALIBRATION_CHARS = 1200
DONE = b"[DONE]"


@dataclass(slots=True)
class Sample:
    """One request. Times in seconds; `error` says why it has no answer."""

    ttft: float = 0.0
    gaps: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    error: str = ""


@dataclass(frozen=True, slots=True)
class Server:
    """An OpenAI server: its model, and how long its tokens are in this text."""

    name: str
    client: httpx.AsyncClient
    model: str
    chars_per_token: float


class ServerError(Exception):
    """A server that cannot be measured; the message says which and why."""


async def open_server(name: str, url: str, text: str) -> Server:
    """Ask for the model and count the tokens of some text, which warms the server up as well. Raises ServerError."""
    client = httpx.AsyncClient(
        base_url=url,
        timeout=httpx.Timeout(SILENCE_SECONDS, connect=5.0),
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
        headers={"accept-encoding": "identity"},
    )
    try:
        models = (await client.get("/v1/models")).raise_for_status().json()
        model = str(models["data"][0]["id"])
        body = {"model": model, "prompt": text[:CALIBRATION_CHARS], "max_tokens": 1, "temperature": 0}
        answer = (await client.post("/v1/completions", json=body)).raise_for_status().json()
    except httpx.HTTPStatusError as error:
        await client.aclose()
        raise ServerError(f"{name} at {url}: HTTP {error.response.status_code}: {error.response.text[:300]}") from error
    except (httpx.HTTPError, ValueError, KeyError, IndexError) as error:
        await client.aclose()
        raise ServerError(f"{name} at {url}: {error or type(error).__name__}") from error
    return Server(name, client, model, min(len(text), CALIBRATION_CHARS) / answer["usage"]["prompt_tokens"])


async def events(response: httpx.Response) -> AsyncIterator[list[Any]]:
    """The data of server-sent events up to [DONE], parsed; those that arrived together come together."""
    buffer = b""
    async for piece in response.aiter_raw():
        *complete, buffer = (buffer + piece).replace(b"\r\n", b"\n").split(b"\n\n")
        data = [event.removeprefix(b"data:").strip() for event in complete if event.startswith(b"data:")]
        yield [json.loads(each) for each in data if each != DONE]
        if DONE in data:
            return


async def ask(server: Server, prompt: str, output_tokens: int, headers: Mapping[str, str] | None = None) -> Sample:
    """One streamed completion; failures are told in the sample."""
    body = {
        "model": server.model,
        "prompt": prompt,
        "max_tokens": output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    sample, began = Sample(), time.perf_counter()
    try:
        async with server.client.stream("POST", "/v1/completions", json=body, headers=headers) as response:
            if response.status_code != httpx.codes.OK:
                sample.error = f"HTTP {response.status_code}"
            else:
                await _measure(response, sample, began)
    except (httpx.HTTPError, ValueError) as error:
        sample.error = type(error).__name__
    return sample


async def _measure(response: httpx.Response, sample: Sample, began: float) -> None:
    last, num_pieces = 0.0, 0
    async for arrived in events(response):
        now = time.perf_counter()
        num_new = sum(_read(event, sample) for event in arrived)
        if num_new and not last:
            sample.ttft = now - began
        elif num_new:
            # pieces that arrive together share the time they took
            sample.gaps.extend([(now - last) / num_new] * num_new)
        last = now if num_new else last
        num_pieces += num_new
    # a server that keeps its usage to itself is taken to send a token a piece
    sample.output_tokens = sample.output_tokens or num_pieces
    if not sample.error and not num_pieces:
        sample.error = "no text"


def _read(event: Any, sample: Sample) -> bool:
    """Take what an event says into the sample; does it carry text."""
    if error := event.get("error"):  # OpenAI's object, or, by others, a text
        sample.error = str(error.get("code") or error.get("message") if isinstance(error, dict) else error)
    if usage := event.get("usage"):
        sample.prompt_tokens, sample.output_tokens = usage["prompt_tokens"], usage["completion_tokens"]
        sample.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return any(choice.get("text") for choice in event.get("choices", ()))
