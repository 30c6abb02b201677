"""Client of OpenAI-compatible servers: streamed completions, each event with the time of its arrival.

    client = open_client(url, api_key)
    async for event in stream_completion(client, encode_request({"model": ..., "messages": [...]})):
        print(event.text, end="")

Every function raises CompletionError and nothing else for a server that is unreachable, rejects a request, or breaks
off an answer. Set the timeout of a client (`client.timeout`) to bound the silence between two events.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from weft.options import MAX_PORT

DEFAULT_URL = "http://127.0.0.1:8000"
LOOPBACK_HOSTS = ("127.0.0.1", "::1", "localhost")
CONNECT_SECONDS = 5.0
# between two pieces of an answer; prompts can wait behind others
SILENCE_SECONDS = 120.0
MAX_ERROR_CHARS = 500
DONE = b"[DONE]"
NO_TEXT = "what is to be sent is no UTF-8 text"
# the fields of a delta that hold reasoning; vLLM uses the second
REASONING = ("reasoning_content", "reasoning")
# what reading an answer raises that is shaped otherwise, such as `"data": null` where a server has no model
MALFORMED = (LookupError, ValueError, TypeError, AttributeError)
# what can stand behind "Bearer"
_KEY = re.compile(r"[!-~]+", re.ASCII)
# the path and the body of a completion
Request = tuple[str, bytes]


class CompletionError(Exception):
    """The server is unreachable, rejected the request or broke off its answer; the message says what to do.

    `summary`: the same in a few words, for counting failures by kind.
    """

    def __init__(self, message: str, summary: str = "") -> None:
        super().__init__(message)
        self.summary = summary or message


@dataclass(frozen=True, slots=True)
class TokenUsage:
    """Token counts as the server reports them."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class CompletionEvent:
    """One event of an answer. `at`: `time.perf_counter()` when its bytes arrived; events of one packet share it."""

    at: float
    text: str = ""
    reasoning: str = ""
    finish_reason: str = ""
    usage: TokenUsage | None = None

    @property
    def has_token(self) -> bool:
        """True if the event holds text or reasoning."""
        return bool(self.text or self.reasoning)


def open_client(url: str, api_key: str = "", limits: httpx.Limits | None = None) -> httpx.AsyncClient:
    """Return a client of the server at `url`, which may end in `/v1`; the caller closes it.

    Raises CompletionError for an invalid URL or key.
    """
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise CompletionError(f"--url {url} is not a URL: {error}") from error
    if parsed.scheme not in ("http", "https") or not parsed.host or (parsed.port or 0) > MAX_PORT:
        raise CompletionError(f"--url {url} is not a gateway's URL; expected one like {DEFAULT_URL}")
    if api_key and not _KEY.fullmatch(api_key):
        raise CompletionError("the API key (--api-key, WEFT_API_KEY) has characters that no key has")
    try:
        # honours SSL_CERT_FILE, for a private authority
        verify = httpx.create_ssl_context() if parsed.scheme == "https" else True
    except OSError as error:
        raise CompletionError(f"SSL_CERT_FILE: {error.strerror}") from error
    authorization = {"authorization": f"Bearer {api_key}"} if api_key else {}
    return httpx.AsyncClient(
        base_url=url.rstrip("/").removesuffix("/v1"),
        headers={"accept-encoding": "identity", **authorization},
        timeout=httpx.Timeout(SILENCE_SECONDS, connect=CONNECT_SECONDS),
        verify=verify,
        # the proxy of the environment does not reach this machine
        trust_env=parsed.host not in LOOPBACK_HOSTS,
        limits=limits or httpx.Limits(),
    )


async def served_model(client: httpx.AsyncClient) -> str:
    """Return the first model that the server lists."""
    try:
        response = await client.get("/v1/models")
        await _check(response)
        if (models := response.json()["data"]) == []:
            raise CompletionError(f"{client.base_url} lists no model: wait until it has one, or pass --model")
        return str(models[0]["id"])
    except httpx.ConnectError as error:
        raise _unreached(client, error) from error
    except httpx.HTTPError as error:
        is_http = client.base_url.scheme == "http" and isinstance(error, httpx.ReadError | httpx.RemoteProtocolError)
        advice = "; a gateway with a certificate wants https:// in --url, and no --url its gRPC port" if is_http else ""
        raise CompletionError(f"{client.base_url} does not answer like a mesh: {error!r}{advice}") from error
    except MALFORMED as error:
        raise _malformed(client) from error


def encode_request(body: Mapping[str, Any]) -> Request:
    """Return the path and the body of a streamed chat (`messages`) or completion (`prompt`) with usage."""
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    whole = {**body, "stream": True, "stream_options": {"include_usage": True}}
    return path, encode_text(json.dumps(whole, ensure_ascii=False))


def encode_text(text: str) -> bytes:
    """Encode as UTF-8. Raises CompletionError for input bytes that were not UTF-8, which Python keeps as surrogates."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise CompletionError(NO_TEXT) from error


async def stream_completion(
    client: httpx.AsyncClient, request: Request, headers: Mapping[bytes, bytes] | None = None
) -> AsyncGenerator[CompletionEvent, None]:
    """POST the request and yield the events of its answer; an answer without an end is an error.

    A caller that may stop early wraps it in `contextlib.aclosing`.
    """
    path, body = request
    headers = {b"content-type": b"application/json", **(headers or {})}
    is_whole = False
    try:
        async with client.stream("POST", path, content=body, headers=headers) as response:
            await _check(response)
            async for at, data in _events(response):
                if data == DONE:
                    is_whole = True  # read on: only a response that was read to its end frees its connection
                    continue
                event = _parse(json.loads(data), at)
                is_whole = is_whole or bool(event.finish_reason)
                yield event
    except httpx.ConnectError as error:
        raise _unreached(client, error) from error
    except httpx.HTTPError as error:
        name = type(error).__name__
        raise CompletionError(f"the connection to {client.base_url} broke: {error or name}", name) from error
    except MALFORMED as error:
        raise _malformed(client) from error
    if not is_whole:
        raise CompletionError("the stream ended before its last event", "broken off before the answer's end")


async def _events(response: httpx.Response) -> AsyncIterator[tuple[float, bytes]]:
    """Yield the arrival and the data of each server-sent event. OpenAI's events have one data line each."""
    rest = b""
    async for piece in response.aiter_bytes():
        at = time.perf_counter()
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield at, line.removeprefix(b"data:").strip()


def _parse(event: dict[str, Any], at: float) -> CompletionEvent:
    if error := event.get("error"):  # OpenAI's object, or a string
        said = str((error.get("message") or error.get("code") or error) if isinstance(error, dict) else error)
        raise CompletionError(f"failed: {said}", said)
    usage = None
    if counts := event.get("usage"):
        cached = (counts.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        usage = TokenUsage(counts["prompt_tokens"], counts["completion_tokens"], cached)
    text, reasoning, finish_reason = "", "", ""
    for choice in event.get("choices") or ():
        finish_reason = choice.get("finish_reason") or finish_reason
        delta = choice.get("delta", {})
        text += (delta.get("content") if "delta" in choice else choice.get("text")) or ""
        reasoning += next((thought for name in REASONING if (thought := delta.get(name))), "")
    return CompletionEvent(at, text, reasoning, finish_reason, usage)


async def _check(response: httpx.Response) -> None:
    """Raise CompletionError with the message of an error response: OpenAI's, or the start of the body."""
    if response.status_code == httpx.codes.OK:
        return
    body = await response.aread()
    try:
        said = str(json.loads(body)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        said = " ".join(body.decode(errors="replace").split())[:MAX_ERROR_CHARS]
        said = response.reason_phrase if not said or said.startswith("<") else said
    hint = "; pass --api-key KEY or set WEFT_API_KEY" if response.status_code == httpx.codes.UNAUTHORIZED else ""
    raise CompletionError(f"rejected ({response.status_code}): {said}{hint}", f"HTTP {response.status_code}: {said}")


def _malformed(client: httpx.AsyncClient) -> CompletionError:
    message = f"{client.base_url} does not answer like a mesh: its answer is not OpenAI's; check --url"
    return CompletionError(message, "an event that is not OpenAI's")


def _unreached(client: httpx.AsyncClient, error: httpx.ConnectError) -> CompletionError:
    if "CERTIFICATE" in str(error):
        advice = (
            "SSL_CERT_FILE names the authority (`weft certs` leaves its in ca.pem), --url a host of the certificate's"
        )
        message = f"the certificate of {client.base_url} is not accepted ({error}): {advice}"
    elif "SSL" in str(error):
        message = f"{client.base_url} does not use TLS ({error}): use http:// in --url"
    else:
        message = f"no mesh answers at {client.base_url}: start one with `weft up`, or pass --url"
    return CompletionError(message, type(error).__name__)
