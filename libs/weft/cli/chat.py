"""`weft chat`: a conversation in the terminal, streamed, with what each answer cost.

On a terminal Ctrl-C stops the current answer and Ctrl-D leaves; from a pipe each line is a message, and Ctrl-C ends it.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import sys
from dataclasses import dataclass, field
from typing import Any

import httpx
from rich.console import Console
from rich.text import Text

from weft.cli.completion_client import (
    CompletionStats,
    MeshError,
    open_client,
    printable,
    read_input,
    served_model,
    stream_text,
)

HELP = "/reset forgets the conversation, /quit leaves, Ctrl-C stops an answer"


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
    except MeshError as error:
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
    """The next message; None at the end of input. Raises MeshError."""
    try:
        return read_input(lambda: input("> " if is_terminal else ""))
    except (EOFError, KeyboardInterrupt):
        if is_terminal:
            print()
        return None


def _answer(runner: asyncio.Runner, client: httpx.AsyncClient, chat: Chat, text: str, console: Console) -> None:
    """One exchange. A stopped answer stays in the conversation as far as it came, a failed one does not."""
    chat.messages.append({"role": "user", "content": text})
    figures, pieces = CompletionStats(), list[str]()

    async def receive() -> None:
        async for piece in stream_text(client, chat.body(), chat.session, figures):
            pieces.append(piece)
            print(printable(piece), end="", flush=True)

    ended = ""
    try:
        runner.run(receive())
    except KeyboardInterrupt:
        if not sys.stdin.isatty():
            raise  # lines of a file, each of which would have to be stopped
        ended = " [stopped]"
    except MeshError as error:
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
    except MeshError as error:
        print(f"weft generate: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


async def _generate(url: str, api_key: str, body: dict[str, Any]) -> None:
    figures, is_terminal = CompletionStats(), sys.stdout.isatty()
    async with open_client(url, api_key) as client:
        body = {"model": await served_model(client), **body}
        async for text in stream_text(client, body, "", figures):
            print(printable(text) if is_terminal else text, end="", flush=True)
    print()
    print(figures, file=sys.stderr)
