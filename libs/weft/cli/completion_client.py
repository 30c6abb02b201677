"""Streamed completions as a client sees them: text pieces, then figures. Speaks OpenAI's dialect, nothing of Weft's."""

from __future__ import annotations

import json
import re
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import httpx

from weft.cli.mesh_registry import DEFAULT_URL
from weft.config import MAX_PORT

LOOPBACK_HOSTS = ("127.0.0.1", "::1", "localhost")
CONNECT_SECONDS = 5.0
# between two pieces of an answer; prompts can wait behind others
SILENCE_SECONDS = 120.0
MIN_RATE_SECONDS = 0.02
DONE = "[DONE]"
# where a delta keeps what a model thinks before it answers; vLLM says the second
THOUGHTS = ("reasoning_content", "reasoning")
# what reading an answer raises that is shaped otherwise, such as `"data": null` where a server has no model
NOT_OPENAIS = (LookupError, ValueError, TypeError, AttributeError)
NO_TEXT = "what is to be sent is no UTF-8 text"
# what can stand behind "Bearer"
_KEY = re.compile(r"[!-~]+", re.ASCII)
_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class MeshError(Exception):
    """The gateway is unreachable or rejected the request; the message says what to do."""


@dataclass(slots=True)
class CompletionStats:
    """Token counts and times of one answer; seconds since the request was sent."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    first_token_seconds: float = 0.0
    total_seconds: float = 0.0
    finish_reason: str = ""

    def __str__(self) -> str:
        rate, rest = "", self.total_seconds - self.first_token_seconds
        # an answer in one piece has no rate
        if self.completion_tokens > 1 and rest > MIN_RATE_SECONDS:
            rate = f" · {(self.completion_tokens - 1) / rest:.0f} tokens/s"
        cached = f"{self.cached_tokens}/{self.prompt_tokens} prompt tokens cached"
        cut = " · cut at max_tokens" if self.finish_reason == "length" else ""
        first = f"first token {self.first_token_seconds * 1e3:.0f} ms"
        return f"{first}{rate} · {self.completion_tokens} tokens · {cached}{cut}"


def open_client(url: str, api_key: str = "", limits: httpx.Limits | None = None) -> httpx.AsyncClient:
    """Return a client of the gateway at `url`, which may end in `/v1`; the caller closes it.

    Raises MeshError for an invalid URL or key.
    """
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise MeshError(f"--url {url} is not a URL: {error}") from error
    if parsed.scheme not in ("http", "https") or not parsed.host or (parsed.port or 0) > MAX_PORT:
        raise MeshError(f"--url {url} is not a gateway's URL; expected one like {DEFAULT_URL}")
    timeout = httpx.Timeout(SILENCE_SECONDS, connect=CONNECT_SECONDS)
    # the proxy of the environment does not reach this machine
    trust_env = parsed.host not in LOOPBACK_HOSTS
    if api_key and not _KEY.fullmatch(api_key):
        raise MeshError("the API key (--api-key, WEFT_API_KEY) has characters that no key has")
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    limits = limits or httpx.Limits()
    try:
        # honours SSL_CERT_FILE, for a private authority
        verify = httpx.create_ssl_context() if parsed.scheme == "https" else True
    except OSError as error:
        raise MeshError(f"SSL_CERT_FILE: {error.strerror}") from error
    return httpx.AsyncClient(
        base_url=url.rstrip("/").removesuffix("/v1"),
        headers=headers,
        timeout=timeout,
        verify=verify,
        trust_env=trust_env,
        limits=limits,
    )


def printable(text: str) -> str:
    """Remove control characters, so that a model's text cannot control the terminal."""
    return _UNPRINTABLE.sub("", text)


async def stream_text(
    client: httpx.AsyncClient, body: dict[str, Any], session: str, figures: CompletionStats
) -> AsyncIterator[str]:
    """POST a chat (`messages`) or completion (`prompt`) and yield its text; fills the figures. Raises MeshError."""
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    body = {**body, "stream": True, "stream_options": {"include_usage": True}}
    headers = {b"x-session-affinity": _sendable(session)} if session else {}
    content = _sendable(json.dumps(body, ensure_ascii=False))
    headers[b"content-type"] = b"application/json"
    began = time.monotonic()
    try:
        async with client.stream("POST", path, content=content, headers=headers) as response:
            await _check(response)
            async for event in _events(response):
                text, has_token = _read(event, figures)
                figures.total_seconds = time.monotonic() - began
                if has_token:
                    figures.first_token_seconds = figures.first_token_seconds or figures.total_seconds
                if text:
                    yield text
    except httpx.ConnectError as error:
        raise _unreached(client, error) from error
    except httpx.HTTPError as error:
        raise MeshError(f"the connection to {client.base_url} broke: {error or type(error).__name__}") from error
    except NOT_OPENAIS as error:
        raise _no_mesh(client, error) from error


def read_input(read: Callable[[], str]) -> str:
    """Return the user's input. Raises MeshError if it is not UTF-8."""
    try:
        return read()
    except UnicodeDecodeError as error:
        raise MeshError(NO_TEXT) from error


def _sendable(text: str) -> bytes:
    """Encode as UTF-8. Raises MeshError for input bytes that were not UTF-8, which Python keeps as surrogates."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise MeshError(NO_TEXT) from error


async def served_model(client: httpx.AsyncClient) -> str:
    """Return the first model that the mesh serves. Raises MeshError."""
    try:
        response = await client.get("/v1/models")
        await _check(response)
        if (models := response.json()["data"]) == []:
            raise MeshError(f"{client.base_url} lists no model: wait until it has one, or pass --model")
        return str(models[0]["id"])
    except httpx.ConnectError as error:
        raise _unreached(client, error) from error
    except (httpx.HTTPError, *NOT_OPENAIS) as error:
        raise _no_mesh(client, error) from error


def _no_mesh(client: httpx.AsyncClient, error: Exception) -> MeshError:
    if isinstance(error, NOT_OPENAIS):
        return MeshError(f"{client.base_url} does not answer like a mesh: its answer is not OpenAI's; check --url")
    is_other = client.base_url.scheme == "http" and isinstance(error, httpx.ReadError | httpx.RemoteProtocolError)
    advice = "; a gateway with a certificate wants https:// in --url, and no --url its gRPC port" if is_other else ""
    return MeshError(f"{client.base_url} does not answer like a mesh: {error!r}{advice}")


def _unreached(client: httpx.AsyncClient, error: httpx.ConnectError) -> MeshError:
    if "CERTIFICATE" in str(error):
        advice = (
            "SSL_CERT_FILE names the authority (`weft certs` leaves its in ca.pem), --url a host of the certificate's"
        )
        return MeshError(f"the certificate of {client.base_url} is not accepted ({error}): {advice}")
    if "SSL" in str(error):
        return MeshError(f"{client.base_url} does not use TLS ({error}): use http:// in --url")
    return MeshError(f"no mesh answers at {client.base_url}: start one with `weft up`, or pass --url")


async def _check(response: httpx.Response) -> None:
    if response.status_code == 200:
        return
    said = message_of(response, await response.aread())
    hint = "; pass --api-key KEY or set WEFT_API_KEY" if response.status_code == httpx.codes.UNAUTHORIZED else ""
    raise MeshError(f"rejected ({response.status_code}): {said}{hint}")


def message_of(response: httpx.Response, body: bytes) -> str:
    """Return the message of an error response: OpenAI's, or the start of the body."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        said = " ".join(body.decode(errors="replace").split())[:500]
        return response.reason_phrase if not said or said.startswith("<") else said


def error_text(error: Any) -> str:
    """Return the text of an event's `error`, an OpenAI object or a plain string."""
    return str((error.get("message") or error.get("code") or error) if isinstance(error, dict) else error)


async def _events(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """Yield the data of each server-sent event until [DONE]. Raises MeshError if the stream ends earlier."""
    async for line in response.aiter_lines():
        if not line.startswith("data:"):
            continue
        data = line[5:].strip()
        if data == DONE:
            return
        event = json.loads(data)
        if error := event.get("error"):
            raise MeshError(f"failed: {error_text(error)}")
        yield event
    raise MeshError("the stream ended before its last event")


def _read(event: dict[str, Any], figures: CompletionStats) -> tuple[str, bool]:
    """Return the event's text, and whether it has a token, reasoning included; usage goes to `figures`."""
    if usage := event.get("usage"):
        figures.prompt_tokens = usage["prompt_tokens"]
        figures.completion_tokens = usage["completion_tokens"]
        figures.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    text, has_thought = "", False
    for choice in event.get("choices", ()):
        figures.finish_reason = choice.get("finish_reason") or figures.finish_reason
        delta = choice.get("delta", {})
        text += (delta.get("content") if "delta" in choice else choice.get("text")) or ""
        has_thought |= any(delta.get(name) for name in THOUGHTS)
    return text, bool(text) or has_thought
