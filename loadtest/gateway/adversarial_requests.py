"""Hostile requests, each sent many times: `python -m loadtest.gateway.adversarial_requests`.

For each: the status that it gets and should get, how long that takes, how long `/health` takes others meanwhile, and
the gateway's memory: its peak, and what is left at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import grpc
import uvloop

from loadtest.gateway.stacks import MODEL, Stack, weft
from loadtest.processes import Processes
from loadtest.report import machine, table, verdict

MIB = 1024 * 1024
ANSWER_SECONDS, PROBE_SECONDS = 60.0, 0.02
PATH = b"/v1/chat/completions"
SERVICE = "/weft_mesh.v1.InferenceService"
INVALID_ARGUMENT = 3
JSON = b"content-type: application/json\r\n"
# twice what an allocator keeps of this; one body of 8 MB that stayed with each of 20 refusals would be 160
LEFT_MIB = 100


@dataclass(frozen=True, slots=True)
class Attack:
    """Bytes for a connection, or the message of a gRPC call of `method`, and the status that should come back."""

    name: str
    expected: int
    make: Callable[[], bytes]
    method: str = ""


@dataclass(slots=True)
class Outcome:
    """Over all repetitions. Times in milliseconds, memory in bytes above the gateway's memory before."""

    statuses: set[int] = field(default_factory=set)
    slowest: float = 0.0
    others: float = 0.0
    peak: int = 0
    left: int = 0


def post(body: bytes, path: bytes = PATH) -> bytes:
    """Return a POST with its length."""
    return b"POST %b HTTP/1.1\r\nhost: x\r\n%bcontent-length: %d\r\n\r\n%b" % (path, JSON, len(body), body)


def many(path: bytes, field: bytes, each: bytes) -> bytes:
    """Return a POST with a list of a million equal elements."""
    listed = (b"%b," % each * 10**6)[:-1]
    return post(b'{"model":"%b","max_tokens":1,"%b":[%b]}' % (MODEL.name.encode(), field, listed), path)


def chunked(body: bytes) -> bytes:
    """Return a POST without a length."""
    pieces = [body[at : at + 65536] for at in range(0, len(body), 65536)]
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces)
    return b"POST %b HTTP/1.1\r\nhost: x\r\n%btransfer-encoding: chunked\r\n\r\n%b0\r\n\r\n" % (PATH, JSON, chunks)


def chat(content: bytes, more: bytes = b"") -> bytes:
    """Return a chat with this JSON as its only message's content, and further fields."""
    return b'{"model":"%b","messages":[{"role":"user","content":%b}]%b}' % (MODEL.name.encode(), content, more)


def ids(count: int) -> bytes:
    """Return a DetokenizeRequest with `count` packed token ids of one byte."""
    length = bytes([count >> shift & 0x7F | 0x80 for shift in (0, 7, 14)]) + bytes([count >> 21])
    return b"\x12" + length + b"\1" * count


def head(fields: bytes) -> bytes:
    """Return a request without a body."""
    return b"GET /health HTTP/1.1\r\nhost: x\r\n%b\r\n" % fields


ATTACKS = [
    Attack("a body of 32 MB", 413, lambda: post(chat(b'"%b"' % (b"x" * 32 * MIB)))),
    Attack("the same without a length", 413, lambda: chunked(chat(b'"%b"' % (b"x" * 32 * MIB)))),
    Attack("a string of 10 MB", 413, lambda: post(chat(b'"%b"' % (b"x" * 10 * MIB)))),
    Attack("a string of 7 MB, which a body may have", 400, lambda: post(chat(b'"%b"' % (b"x" * 7 * MIB)))),
    Attack(
        "10^6 messages, 28 MB",
        413,
        lambda: post(b'{"messages":[%b]}' % (b'{"role":"user","content":""},' * 10**6)[:-1]),
    ),
    Attack("10^6 empty messages, 3 MB", 400, lambda: post(b'{"model":"x","messages":[%b]}' % (b"{}," * 10**6)[:-1])),
    Attack("10^6 parts of a message", 400, lambda: post(chat(b"[%b]" % (b"{}," * 10**6)[:-1]))),
    Attack("10^6 stop strings", 400, lambda: post(chat(b'""', b',"stop":[%b]' % (b'"x",' * 10**6)[:-1]))),
    Attack("lists in lists, 10^6 deep", 400, lambda: post(chat(b"[" * 10**6))),
    Attack("objects in objects, in an unknown field", 400, lambda: post(chat(b'""', b',"x":' + b'{"a":' * 10**6))),
    Attack("10^6 empty messages, Anthropic's", 400, lambda: many(b"/v1/messages", b"messages", b"{}")),
    Attack("10^6 messages to be counted", 400, lambda: many(b"/v1/messages/count_tokens", b"messages", b'{"a":1}')),
    Attack("10^6 items of /v1/responses", 400, lambda: many(b"/v1/responses", b"input", b'{"a":1}')),
    Attack(
        "10^6 objects in a call's arguments",
        400,
        lambda: post(
            b'{"model":"%b","messages":[{"role":"assistant","tool_calls":[{"type":"function","function":'
            b'{"name":"f","arguments":"[%b]"}}]}]}' % (MODEL.name.encode(), (b"{}," * 10**6)[:-1])
        ),
    ),
    Attack("4 x 10^6 empty messages over gRPC", INVALID_ARGUMENT, lambda: b"\x12\0" * 4 * 10**6, "Chat"),
    Attack("4 x 10^6 empty inputs over gRPC", INVALID_ARGUMENT, lambda: b"\x12\0" * 4 * 10**6, "Embed"),
    Attack("8 x 10^6 token ids over gRPC", INVALID_ARGUMENT, lambda: ids(8 * 10**6), "Detokenize"),
    Attack("a number of 10^6 digits", 400, lambda: post(chat(b'""', b',"max_tokens":' + b"9" * 10**6))),
    Attack("invalid UTF-8", 400, lambda: post(chat(b'"\xff\xfe\xc3"'))),
    Attack("half a surrogate pair", 400, lambda: post(chat(rb'"\ud800"'))),
    Attack("zero bytes", 400, lambda: post(b"\0" * MIB)),
    Attack("10^4 headers", 400, lambda: head(b"".join(b"h%d: x\r\n" % number for number in range(10_000)))),
    Attack("a header of 8 MB", 400, lambda: head(b"h: %b\r\n" % (b"x" * 8 * MIB))),
    Attack("a path of 8 MB", 400, lambda: b"GET /%b HTTP/1.1\r\nhost: x\r\n\r\n" % (b"x" * 8 * MIB)),
    Attack("no HTTP", 400, lambda: b"\x16\x03\x01\x02\0\x01" * 1000),
]


async def call(stack: Stack, method: str, message: bytes) -> int:
    """Return the status of a gRPC call."""
    async with grpc.aio.insecure_channel(f"127.0.0.1:{stack.grpc_port}") as channel:
        try:
            ask: Any = channel.unary_stream(f"{SERVICE}/{method}")
            async for _ in ask(message, timeout=ANSWER_SECONDS):
                pass
        except grpc.aio.AioRpcError as error:
            return int(error.code().value[0])
    return 0


async def strike(stack: Stack, data: bytes) -> int:
    """Return the answer's status, which may come before all is written; 0 if none came."""
    reader, writer = await asyncio.open_connection("127.0.0.1", stack.port)
    with contextlib.suppress(OSError):
        writer.write(data)
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            line = await reader.readline()
    except (TimeoutError, OSError):
        line = b""
    finally:
        writer.transport.abort()
    return int(line.split()[1]) if line.startswith(b"HTTP/1.1 ") else 0


async def watch(stack: Stack, outcome: Outcome, before: int) -> None:
    """Record the peak memory and the longest `/health` until cancelled."""
    (process,) = stack.measured
    while True:
        began = time.perf_counter()
        if await strike(stack, head(b"connection: close\r\n")) != 200:
            outcome.others = float("inf")
        outcome.others = max(outcome.others, (time.perf_counter() - began) * 1000)
        outcome.peak = max(outcome.peak, int(process.memory_info().rss) - before)
        await asyncio.sleep(PROBE_SECONDS)


async def attack(stack: Stack, what: Attack, times: int) -> Outcome:
    """Attack `times` times, four at a time."""
    (process,) = stack.measured
    outcome, data, before = Outcome(), what.make(), int(process.memory_info().rss)
    watcher = asyncio.get_running_loop().create_task(watch(stack, outcome, before))

    async def again() -> None:
        began = time.perf_counter()
        ended = call(stack, what.method, data) if what.method else strike(stack, data)
        outcome.statuses.add(await ended)
        outcome.slowest = max(outcome.slowest, (time.perf_counter() - began) * 1000)

    for _ in range(0, times, 4):
        await asyncio.gather(*(again() for _ in range(4)))
    watcher.cancel()
    outcome.left = int(process.memory_info().rss) - before
    return outcome


async def run(stack: Stack, times: int) -> tuple[list[tuple[str, ...]], int]:
    """Return the rows, and the gateway's growth in bytes at the end."""
    await attack(stack, Attack("to warm up", 400, lambda: post(b"{}")), 40)
    (process,) = stack.measured
    at_first, rows = int(process.memory_info().rss), list[tuple[str, ...]]()
    for what in ATTACKS:
        outcome = await attack(stack, what, times)
        shown = ", ".join(map(str, sorted(outcome.statuses)))
        wrong = "" if outcome.statuses == {what.expected} else f" (expected {what.expected})"
        memory = (f"{outcome.peak / MIB:+.0f} MiB", f"{outcome.left / MIB:+.0f} MiB")
        rows.append((what.name, f"{shown}{wrong}", f"{outcome.slowest:.0f} ms", f"{outcome.others:.0f} ms", *memory))
    grown = int(process.memory_info().rss) - at_first
    rows.append(("all of them", "", "", "", "", f"{grown / MIB:+.0f} MiB on {at_first / MIB:.0f}"))
    return rows, grown


def main() -> int:
    """Attack and print; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.gateway.adversarial_requests", description=__doc__)
    parser.add_argument("--times", type=int, default=20, help="each, four at a time")
    options = parser.parse_args()
    with Processes() as processes:
        rows, grown = uvloop.run(run(weft(1)(processes, 100.0), options.times))
    headings = (f"{options.times} times", "status", "slowest", "others waited at most", "memory, peak", "memory, left")
    print(f"{machine()}\n\n{table(headings, rows)}")
    is_right, is_flat = not any("(expected" in row[1] for row in rows), grown <= LEFT_MIB * MIB
    print("\nevery status is right" if is_right else "\nMISSED: a status is wrong")
    print(f"memory that is left, {grown / MIB:+.0f} MiB, {verdict(is_flat, f'{LEFT_MIB} MiB')}")
    return 0 if is_right and is_flat else 1


if __name__ == "__main__":
    sys.exit(main())
