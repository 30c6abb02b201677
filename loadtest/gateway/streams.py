"""Ten thousand quiet streams on one gateway, and clients that do not read: `python -m loadtest.gateway.streams`.

First: the gateway's memory for a waiting stream, and whether each stream has all its tokens in the end. Then: how far
apart tokens arrive at clients that read, alone and beside clients that have stopped reading.
"""

from __future__ import annotations

import argparse
import asyncio
import time

import uvloop

from loadtest.gateway.client import COUNT, TAIL_BYTES, request_bytes
from loadtest.gateway.stacks import Stack, weft
from loadtest.processes import Processes, cpu_seconds
from loadtest.report import machine, percentile, table
from weft.file_descriptors import raise_fd_limit

# idle streams: a token every ten seconds
IDLE_STEP_SECONDS, IDLE_TOKENS = 10.0, 13
OPENED_AT_A_TIME = 64
# 200 tokens a second for each reader; a client that does not read asks for many choices, to fill the buffers sooner
BUSY_STEPS, BUSY_TOKENS, NUM_READERS = 200.0, 1500, 16
STALLED_CHOICES = 16
READ_BYTES = 1 << 16
WAIT_SECONDS = 300.0


class Stream:
    """One stream that has begun; `gaps` are seconds between two pieces."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, first: bytes) -> None:
        self._reader, self.writer, self._tail = reader, writer, first
        self.gaps: list[float] = []

    async def read(self) -> None:
        """Read to the end."""
        last = time.perf_counter()
        while not self._tail.endswith(b"0\r\n\r\n") and (data := await self._reader.read(READ_BYTES)):
            now = time.perf_counter()
            self.gaps.append(now - last)
            last, self._tail = now, (self._tail + data)[-TAIL_BYTES:]
        self.writer.close()

    def lacks(self, num_tokens: int) -> str:
        """Return the end of a stream that has not ended with so many tokens, or ""."""
        is_whole = b"data: [DONE]" in self._tail and COUNT.findall(self._tail)[-1:] == [b"%d" % num_tokens]
        return "" if is_whole else repr(self._tail[-200:])


async def open_stream(stack: Stack, max_tokens: int, choices: int = 1) -> Stream:
    """Send a request and wait for the first piece."""
    reader, writer = await asyncio.open_connection("127.0.0.1", stack.port)
    writer.write(request_bytes(stack.model, max_tokens, stream=True, n=choices))
    return Stream(reader, writer, await asyncio.wait_for(reader.read(READ_BYTES), WAIT_SECONDS))


async def open_streams(stack: Stack, count: int, max_tokens: int) -> list[Stream]:
    """Open streams, some at a time."""
    slots = asyncio.Semaphore(OPENED_AT_A_TIME)

    async def one() -> Stream:
        async with slots:
            return await open_stream(stack, max_tokens)

    return await asyncio.gather(*(one() for _ in range(count)))


async def read_all(streams: list[Stream]) -> None:
    await asyncio.wait_for(asyncio.gather(*(stream.read() for stream in streams)), WAIT_SECONDS)


def rss_mib(stack: Stack) -> float:
    """Return the gateway's memory."""
    return sum(int(process.memory_info().rss) for process in stack.measured) / 2**20


async def idle_streams(stack: Stack, count: int) -> list[tuple[str, str]]:
    """Return the rows of the first part."""
    await read_all(await open_streams(stack, OPENED_AT_A_TIME, 1))
    before, began = rss_mib(stack), time.perf_counter()
    streams = await open_streams(stack, count, IDLE_TOKENS)
    opened, held = time.perf_counter() - began, rss_mib(stack)
    cpu, began = cpu_seconds(stack.measured), time.perf_counter()
    await read_all(streams)
    load = (cpu_seconds(stack.measured) - cpu) / (time.perf_counter() - began)
    broken = [end for stream in streams if (end := stream.lacks(IDLE_TOKENS))]
    for end in broken[:5]:
        print(f"not whole: ... {end}")
    per_stream = f"{(held - before) / count * 1024:.1f} KiB"
    return [
        ("streams opened", f"{count:,} in {opened:.1f} s"),
        ("dropped, or not whole in the end (bar: 0)", f"{len(broken):,}"),
        ("gateway's memory before / with all / a stream", f"{before:.0f} MiB / {held:.0f} MiB / {per_stream}"),
        ("gateway's memory after", f"{rss_mib(stack):.0f} MiB"),
        ("gateway's CPU while they wait", f"{load:.0%} of a core"),
    ]


async def slow_readers(stack: Stack, num_stalled: int) -> list[tuple[str, str]]:
    """Return rows of readers alone, and beside clients that do not read."""
    rows = []
    for stalled in (0, num_stalled):
        silent = [await open_stream(stack, BUSY_TOKENS, STALLED_CHOICES) for _ in range(stalled)]
        readers = await open_streams(stack, NUM_READERS, BUSY_TOKENS)
        await read_all(readers)
        gaps = [gap * 1000 for reader in readers for gap in reader.gaps]
        whole = sum(not reader.lacks(BUSY_TOKENS) for reader in readers)
        shown = f"p50 {percentile(gaps, 50):.1f} ms, p99 {percentile(gaps, 99):.1f} ms, {whole} whole"
        rows.append((f"between two pieces, {NUM_READERS} readers beside {stalled} that do not read", shown))
        for stream in silent:
            stream.writer.transport.abort()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=10_000)
    parser.add_argument("--stalled", type=int, default=4, help="clients that do not read")
    options = parser.parse_args()
    if (hard := raise_fd_limit()) < options.streams + 1000:
        parser.error(f"--streams {options.streams}: this user may have {hard} files open (ulimit -n)")
    with Processes() as processes:
        rows = uvloop.run(idle_streams(weft(1)(processes, 1 / IDLE_STEP_SECONDS), options.streams))
    with Processes() as processes:
        rows += uvloop.run(slow_readers(weft(1)(processes, BUSY_STEPS), options.stalled))
    print(f"{machine()}\n\n{table(('', ''), rows)}")


if __name__ == "__main__":
    main()
