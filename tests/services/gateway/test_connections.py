"""Connection limits: heads, trailers, pipelining and keep-alive."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator

import pytest

from tests.services.gateway.conftest import END, MODEL_NAME, Bench, MakeBench
from tests.services.gateway.fakes import SequenceDelta, Start, deltas, speaking
from tests.services.gateway.test_disconnect import connect, request_bytes
from weft_services.gateway.front import http_server
from weft_services.gateway.front.http_server import MAX_HEAD_BYTES, MAX_PIPELINED

CHUNKED = b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
GET = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"


def chunked(fields: dict[str, object], path: bytes = b"/v1/completions") -> bytes:
    """A request up to its last chunk, behind which trailers may come."""
    body = json.dumps({"model": MODEL_NAME, **fields}).encode()
    return CHUNKED % path + b"%x\r\n%b\r\n0\r\n" % (len(body), body)


async def body_of(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    (length,) = (line for line in head.split(b"\r\n") if line.startswith(b"content-length: "))
    return await reader.readexactly(int(length.partition(b": ")[2]))


@pytest.mark.parametrize("junk", [b"x: " + b"a" * 4096, b"\r\n" * 2048], ids=["a trailer", "empty lines"])
async def test_what_is_neither_head_nor_body_has_an_end(bench: MakeBench, junk: bytes) -> None:
    async with bench() as b, asyncio.timeout(20):
        reader, writer = await connect(b)
        writer.write(chunked({"prompt": "hello"}) if junk[:1] == b"x" else GET)
        if junk[:1] != b"x":
            await body_of(reader)
        heard = asyncio.create_task(reader.read())
        for _ in range(2 + 2 * MAX_HEAD_BYTES // len(junk)):
            if not heard.done():
                writer.write(junk)
                await b.http.get("/health")  # so that it is read by itself
            junk = junk.removeprefix(b"x: ")
        with contextlib.suppress(ConnectionResetError):
            await heard
        writer.close()
        assert b.decode.started == []
        assert b.gateway.pipeline.num_in_flight == 0


async def test_trailers_change_nothing_that_a_head_has_said(bench: MakeBench) -> None:
    async with bench() as b:
        b.decode.script = speaking([*b.ids("hello"), END])
        reader, writer = await connect(b)
        many = b"".join(b"h%d: x\r\n" % number for number in range(100))
        trailers = b"x-vllm-priority: none\r\nauthorization: Bearer another\r\n" + many
        writer.write(chunked({"prompt": "hello"}) + trailers + b"\r\n" + GET)
        assert b"hello" in await body_of(reader)
        assert b"ok" in await body_of(reader)
        assert not b.scheduler.routed[0].tenant
        writer.close()


async def test_a_connection_on_which_too_much_is_asked_at_once_is_closed(bench: MakeBench) -> None:
    async with bench() as b, asyncio.timeout(20):
        b.decode.script = speaking(b.ids("hello"), finish=None)
        reader, writer = await connect(b)
        writer.write(request_bytes(stream=False) + GET * (MAX_PIPELINED + 1))
        assert await reader.read() == b""
        await b.decode.until(lambda: b.decode.cancelled == [start.key.request_id for start in b.decode.started])
        writer.close()


async def test_empty_lines_do_not_keep_a_connection(bench: MakeBench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "KEEP_ALIVE_SECONDS", 0.3)
    async with bench() as b, asyncio.timeout(10):
        reader, writer = await connect(b)
        writer.write(GET)
        await body_of(reader)
        writer.write(b"\r\n")
        assert await reader.read() == b""
        writer.close()


async def leave_behind(b: Bench, packets: list[bytes]) -> None:
    """Ask for an answer that does not end, and then leave; each packet is read by itself."""
    b.decode.script = speaking(b.ids("hello"), finish=None)
    _, writer = await connect(b)
    writer.write(packets[0])
    await b.decode.until(lambda: len(b.decode.started) == 1)
    for packet in packets[1:]:
        writer.write(packet)
        await b.http.get("/health")
    writer.close()
    await b.decode.until(lambda: b.decode.cancelled == [b.decode.started[0].key.request_id])


async def test_a_client_that_leaves_is_missed_behind_another_request_too(bench: MakeBench) -> None:
    async with bench() as b:
        await leave_behind(b, [request_bytes(stream=False) + GET])


async def test_a_client_that_leaves_is_missed_when_it_has_asked_again_meanwhile(bench: MakeBench) -> None:
    async with bench() as b:
        await leave_behind(b, [request_bytes(stream=False), GET])


@pytest.mark.parametrize("junk", [b"}", b"GET / HTTP/1.1\r\nno colon\r\n\r\n", b"CONNECT x HTTP/1.1\r\n\r\n"])
@pytest.mark.parametrize("is_begun", [True, False], ids=["begun", "not begun"])
async def test_what_makes_no_sense_behind_a_request_does_not_spoil_its_answer(
    bench: MakeBench, junk: bytes, is_begun: bool
) -> None:
    async with bench() as b, asyncio.timeout(20):
        may_end = asyncio.Event()

        async def hello(start: Start) -> AsyncIterator[SequenceDelta]:
            first, *rest = deltas(start, [*b.ids("hello"), END])
            yield first
            await may_end.wait()
            for delta in rest:
                yield delta

        b.decode.script = hello
        reader, writer = await connect(b)
        writer.write(request_bytes(stream=True) + (b"" if is_begun else junk))
        said = await reader.readuntil(b"data: ") if is_begun else b""
        writer.write(junk if is_begun else b"")
        await b.http.get("/health")  # so that it is read
        may_end.set()
        said += await reader.read()
        assert said.startswith(b"HTTP/1.1 200")
        assert said.endswith(b"[DONE]\n\n\r\n0\r\n\r\n")
        assert said.count(b"HTTP/1.1") == 1
        writer.close()


async def test_a_body_that_breaks_off_in_nonsense_is_told_so(bench: MakeBench) -> None:
    async with bench() as b:
        reader, writer = await connect(b)
        writer.write(CHUNKED % b"/v1/completions" + b"nonsense\r\n")
        assert (await reader.read()).startswith(b"HTTP/1.1 400")
        writer.close()


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "unstreamed"])
async def test_http_1_0_is_answered_without_chunks(bench: MakeBench, stream: bool) -> None:
    async with bench() as b, asyncio.timeout(10):
        b.decode.script = speaking([*b.ids("hello world"), END])
        reader, writer = await connect(b)
        writer.write(request_bytes(stream).replace(b"HTTP/1.1", b"HTTP/1.0", 1))
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200")
        assert b"transfer-encoding" not in head
        events = body.removesuffix(b"data: [DONE]\n\n").split(b"\n\n")[:-1] if stream else [b"data: " + body]
        assert body.endswith(b"data: [DONE]\n\n") == stream
        told = [json.loads(event.removeprefix(b"data: "))["choices"][0]["text"] for event in events]
        assert "".join(told) == "hello world"
        writer.close()


async def test_the_head_of_a_stream_without_end_is_all_that_is_sent_of_it(bench: MakeBench) -> None:
    async with bench() as b, asyncio.timeout(10):
        head = await b.http.head("/weft/fleet/events")
        assert (head.status_code, head.headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
        assert (await b.http.get("/health")).status_code == 200, "on the same connection"
