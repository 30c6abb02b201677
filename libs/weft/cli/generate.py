"""`weft generate`: one streamed answer on standard output, its figures on standard error."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from weft.cli.stream import Figures, MeshError, open_client, printable, read_input, served_model, stream_text


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
    figures, is_terminal = Figures(), sys.stdout.isatty()
    async with open_client(url, api_key) as client:
        body = {"model": await served_model(client), **body}
        async for text in stream_text(client, body, "", figures):
            print(printable(text) if is_terminal else text, end="", flush=True)
    print()
    print(figures, file=sys.stderr)
