"""`python -m loadtest.gateway.streams`: ten thousand streams on one gateway that hardly say anything, and clients that
do not read.

First: what a stream takes of the gateway's memory while it waits, and whether each has all its tokens in the end. Then:
how far apart tokens come for clients that read, alone and beside clients that have stopped reading.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from dataclasses import dataclass, field
from typing import Any

import psutil
import uvloop

from loadtest.gateway.client import COUNT, QUESTION
from loadtest.gateway.stacks import Stack, weft
from loadtest.processes import Processes, cpu_seconds
from weft.file_descriptors import raise_fd_limit

# idle streams: a token every ten seconds
IDLE_STEP_SECONDS, IDLE_TOKENS = 10.0, 13
OPENED_AT_A_TIME = 64
# readers: 200 tokens a second for each; whoever does not read asks for many choices, to fill what lies between sooner
BUSY_STEPS, BUSY_TOKENS, NUM_READERS = 200.0, 1500, 16
STALLED_CHOICES = 16
WAIT_SECONDS = 300.0


@dataclass(slots=True)
class Told:
    """What one client saw; `gaps` in seconds."""

    num_events: int = 0
    num_tokens: int = 0
    is_whole: bool = False
    last_words: bytes = b""
    gaps: list[float] = field(default_factory=list)


class Listener(asyncio.Protocol):
    """One stream. One that does not read asks, and takes nothing from its socket after the first piece."""

    def __init__(self, question: bytes, reads: bool = True) -> None:
        loop = asyncio.get_running_loop()
        self.told, self.begun, self.ended = Told(), loop.create_future(), loop.create_future()
        self._question, self._reads = question, reads
        self._tail, self._last = b"", 0.0

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        transport.write(self._question)

    def data_received(self, data: bytes) -> None:
        now, count = time.perf_counter(), data.count(b"data: ")
        if count and self._last:
            self.told.gaps.append(now - self._last)
        self._last = now if count else self._last
        self.told.num_events += count
        self._tail = (self._tail + data)[-1024:]
        if not self.begun.done():
            self.begun.set_result(None)
        if not self._reads:
            self._transport.pause_reading()
        elif self._tail.endswith(b"0\r\n\r\n"):
            self.told.is_whole = b"data: [DONE]" in self._tail
            self.told.num_tokens = int((COUNT.findall(self._tail) or [b"0"])[-1])
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self.close()

    def close(self) -> None:
        """It is over, whatever it has seen."""
        self.told.last_words = self._tail
        for future in (self.begun, self.ended):
            if not future.done():
                future.set_result(None)
        self._transport.close()


def question(stack: Stack, max_tokens: int, choices: int = 1) -> bytes:
    """A streamed chat."""
    fields = {
        "model": stack.model,
        "messages": [{"role": "user", "content": QUESTION}],
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "n": choices,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    body = json.dumps(fields).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: "
    return head + b"%d\r\n\r\n%b" % (len(body), body)


async def listen(stack: Stack, max_tokens: int, reads: bool = True) -> Listener:
    """A stream that has begun."""
    asked = question(stack, max_tokens, 1 if reads else STALLED_CHOICES)
    loop = asyncio.get_running_loop()
    _, listener = await loop.create_connection(lambda: Listener(asked, reads), "127.0.0.1", stack.port)
    await asyncio.wait_for(asyncio.shield(listener.begun), WAIT_SECONDS)
    return listener


async def listen_all(stack: Stack, count: int, max_tokens: int) -> list[Listener]:
    """So many streams, opened some at a time."""
    places = asyncio.Semaphore(OPENED_AT_A_TIME)

    async def one() -> Listener:
        async with places:
            return await listen(stack, max_tokens)

    return await asyncio.gather(*(one() for _ in range(count)))


def rss(stack: Stack) -> int:
    """Bytes that the gateway holds."""
    return sum(int(process.memory_info().rss) for process in stack.measured)


async def idle_streams(stack: Stack, count: int) -> list[tuple[str, str]]:
    """All of them at once; rows of a table."""
    for listener in await listen_all(stack, OPENED_AT_A_TIME, 1):
        await listener.ended
    before, began = rss(stack), time.perf_counter()
    listeners = await listen_all(stack, count, IDLE_TOKENS)
    opened = time.perf_counter() - began
    at_once = sum(not listener.ended.done() for listener in listeners)
    held, cpu, began = rss(stack), cpu_seconds(stack.measured), time.perf_counter()
    await asyncio.wait_for(asyncio.gather(*(listener.ended for listener in listeners)), WAIT_SECONDS)
    load = (cpu_seconds(stack.measured) - cpu) / (time.perf_counter() - began)
    broken = [each.told for each in listeners if not each.told.is_whole or each.told.num_tokens != IDLE_TOKENS]
    for told in broken[:5]:
        print(f"not whole: {told.num_tokens} tokens, {told.num_events} events, ... {told.last_words[-200:]!r}")
    return [
        ("streams opened", f"{count:,} in {opened:.1f} s"),
        ("open at once", f"{at_once:,}"),
        ("dropped, or not whole in the end (bar: 0)", f"{len(broken):,}"),
        (
            "gateway's memory before / with all / a stream",
            f"{_mib(before)} / {_mib(held)} / {(held - before) / count / 1024:.1f} KiB",
        ),
        ("gateway's memory after", _mib(rss(stack))),
        ("gateway's CPU while they wait", f"{load:.0%} of a core"),
    ]


async def slow_readers(stack: Stack, num_stalled: int) -> list[tuple[str, str]]:
    """Readers alone, then beside clients that do not read."""
    rows = []
    for stalled in (0, num_stalled):
        silent = [await listen(stack, BUSY_TOKENS, reads=False) for _ in range(stalled)]
        readers = await listen_all(stack, NUM_READERS, BUSY_TOKENS)
        await asyncio.wait_for(asyncio.gather(*(reader.ended for reader in readers)), WAIT_SECONDS)
        gaps = sorted(gap * 1000 for reader in readers for gap in reader.told.gaps)
        whole = sum(reader.told.is_whole for reader in readers)
        shown = f"p50 {statistics.median(gaps):.1f} ms, p99 {gaps[int(0.99 * len(gaps))]:.1f} ms, {whole} whole"
        rows.append((f"between two pieces, {NUM_READERS} readers beside {stalled} that do not read", shown))
        for listener in silent:
            listener.close()
    return rows


def _mib(size: int) -> str:
    return f"{size / 2**20:.0f} MiB"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.gateway.streams", description=__doc__)
    parser.add_argument("--streams", type=int, default=10_000)
    parser.add_argument("--stalled", type=int, default=4, help="clients that do not read")
    options = parser.parse_args()
    if (hard := raise_fd_limit()) < options.streams + 1000:
        parser.error(f"--streams {options.streams}: this user may have {hard} files open (ulimit -n)")
    rows = []
    with Processes() as processes:
        rows += uvloop.run(idle_streams(weft(1)(processes, 1 / IDLE_STEP_SECONDS), options.streams))
    with Processes() as processes:
        rows += uvloop.run(slow_readers(weft(1)(processes, BUSY_STEPS), options.stalled))
    print(f"load of the machine {psutil.getloadavg()[0]:.1f}\n\n| | |\n| --- | --- |")
    for name, value in rows:
        print(f"| {name} | {value} |")


if __name__ == "__main__":
    main()
