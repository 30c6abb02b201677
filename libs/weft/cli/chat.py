"""`weft chat`: a conversation in the terminal, streamed, with what each answer cost.

On a terminal Ctrl-C stops the current answer and Ctrl-D leaves; from a pipe each line is a message, and Ctrl-C ends it.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import secrets
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
from rich.console import Console
from rich.text import Text

from weft.completion_client import (
    NO_TEXT,
    CompletionError,
    encode_request,
    encode_text,
    open_client,
    served_model,
    stream_completion,
)

HELP = "/reset forgets the conversation, /quit leaves, Ctrl-C stops an answer"
MIN_RATE_SECONDS = 0.02
_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


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


async def _receive(
    client: httpx.AsyncClient, body: dict[str, Any], session: str, show: Callable[[str], None], figures: CompletionStats
) -> None:
    """Show the text of an answer as it arrives and fill in the figures. Raises CompletionError."""
    request = encode_request(body)
    headers = {b"x-session-affinity": encode_text(session)} if session else {}
    began = time.perf_counter()
    async with contextlib.aclosing(stream_completion(client, request, headers)) as events:
        async for event in events:
            figures.total_seconds = event.at - began
            figures.finish_reason = event.finish_reason or figures.finish_reason
            if event.has_token:
                figures.first_token_seconds = figures.first_token_seconds or figures.total_seconds
            if event.usage:
                figures.prompt_tokens = event.usage.prompt_tokens
                figures.completion_tokens = event.usage.completion_tokens
                figures.cached_tokens = event.usage.cached_tokens
            if event.text:
                show(event.text)


def printable(text: str) -> str:
    """Remove control characters, so that a model's text cannot control the terminal."""
    return _UNPRINTABLE.sub("", text)


def read_input(read: Callable[[], str]) -> str:
    """Return the user's input. Raises CompletionError if it is not UTF-8."""
    try:
        return read()
    except UnicodeDecodeError as error:
        raise CompletionError(NO_TEXT) from error


@dataclass(slots=True)
class Chat:
    """A conversation: its gateway, its options and its messages."""

    url: str
    api_key: str = field(default="", repr=False)
    system: str = ""
    session: str = ""
    max_tokens: int = 512
    temperature: float | None = None
    model: str = ""
    messages: list[dict[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.session = self.session or f"chat-{secrets.token_hex(8)}"
        self.reset()

    def reset(self) -> None:
        """Drop all messages but the system prompt."""
        self.messages = [{"role": "system", "content": self.system}] if self.system else []

    def body(self) -> dict[str, Any]:
        """Return the request body that continues the conversation."""
        body: dict[str, Any] = {"model": self.model, "messages": self.messages}
        body["max_tokens"] = self.max_tokens
        return body if self.temperature is None else {**body, "temperature": self.temperature}


def run_chat(chat: Chat) -> int:
    """Talk until the end of input; returns the exit status."""
    if sys.stdin.isatty():
        # line editing and history for input()
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401
    try:
        client = open_client(chat.url, chat.api_key)
        with asyncio.Runner() as runner:
            try:
                _converse(runner, client, chat, Console(highlight=False, soft_wrap=True))
            finally:
                runner.run(client.aclose())
    except CompletionError as error:
        print(f"weft chat: {error}", file=sys.stderr)
        return 1
    return 0


def _converse(runner: asyncio.Runner, client: httpx.AsyncClient, chat: Chat, console: Console) -> None:
    is_terminal = sys.stdin.isatty()
    chat.model = chat.model or runner.run(served_model(client))
    if is_terminal:
        heading = ((chat.model, "bold"), f" at {chat.url}\n", (f"{HELP}\n", "dim"))
        console.print(Text.assemble(*heading))
    while (line := _read_line(is_terminal)) is not None:
        match line.strip():
            case "":
                continue
            case "/quit" | "/exit":
                return
            case "/help":
                console.print(f"[dim]{HELP}[/]\n")
            case "/reset":
                chat.reset()
                console.print("[dim]forgotten[/]\n")
            case text:
                _answer(runner, client, chat, text, console)


def _read_line(is_terminal: bool) -> str | None:
    """Return the next message; None at the end of input. Raises CompletionError."""
    try:
        return read_input(lambda: input("> " if is_terminal else ""))
    except (EOFError, KeyboardInterrupt):
        if is_terminal:
            print()
        return None


def _answer(runner: asyncio.Runner, client: httpx.AsyncClient, chat: Chat, text: str, console: Console) -> None:
    """Run one exchange. The received part of a stopped answer stays in the conversation; a failed answer does not."""
    chat.messages.append({"role": "user", "content": text})
    figures, pieces = CompletionStats(), list[str]()

    def show(piece: str) -> None:
        pieces.append(piece)
        print(printable(piece), end="", flush=True)

    ended = ""
    try:
        runner.run(_receive(client, chat.body(), chat.session, show, figures))
    except KeyboardInterrupt:
        if not sys.stdin.isatty():
            raise  # lines of a file, each of which would have to be stopped
        ended = " [stopped]"
    except CompletionError as error:
        chat.messages.pop()
        if not sys.stdin.isatty():
            raise
        console.print(Text(f"{error}\n", style="red"))
        return
    chat.messages.append({"role": "assistant", "content": "".join(pieces)})
    console.print(Text(f"{ended}\n{figures}\n", style="dim"))


def run_generate(url: str, api_key: str, prompt: str, options: dict[str, Any], is_raw: bool) -> int:
    """Print the answer; returns the exit status."""
    try:
        if prompt == "-":
            prompt = read_input(sys.stdin.read)
        question = {"prompt": prompt} if is_raw else {"messages": [{"role": "user", "content": prompt}]}
        asyncio.run(_generate(url, api_key, {**question, **options}))
    except CompletionError as error:
        print(f"weft generate: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


async def _generate(url: str, api_key: str, body: dict[str, Any]) -> None:
    figures, is_terminal = CompletionStats(), sys.stdout.isatty()

    def show(piece: str) -> None:
        print(printable(piece) if is_terminal else piece, end="", flush=True)

    async with open_client(url, api_key) as client:
        await _receive(client, {"model": await served_model(client), **body}, "", show, figures)
    print()
    print(figures, file=sys.stderr)
