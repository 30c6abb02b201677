"""Connection limits: heads, trailers, upgrades and keep-alive."""

from __future__ import annotations

import asyncio
import contextlib
import json

import pytest

from tests.services.gateway.conftest import END, MODEL_NAME, Bench, MakeBench
from tests.services.gateway.fakes import speaking
from tests.services.gateway.test_disconnect import connect
from weft_services.gateway.front import http_server
from weft_services.gateway.front.http_server import MAX_HEAD_BYTES

CHUNKED = b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
GET = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"


def chunked(fields: dict[str, object], path: bytes = b"/v1/completions") -> bytes:
    """A request up to its last chunk, behind which trailers may come."""
    body = json.dumps({"model": MODEL_NAME, **fields}).encode()
    return CHUNKED % path + b"%x\r\n%b\r\n0\r\n" % (len(body), body)


async def read_body(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    (length,) = (line for line in head.split(b"\r\n") if line.startswith(b"content-length: "))
    return await reader.readexactly(int(length.partition(b": ")[2]))


@pytest.mark.parametrize("junk", [b"x: " + b"a" * 4096, b"\r\n" * 2048], ids=["a trailer", "empty lines"])
async def test_what_is_neither_head_nor_body_has_an_end(bench: MakeBench, junk: bytes) -> None:
    async with bench() as b, asyncio.timeout(20):
        reader, writer = await connect(b)
        writer.write(chunked({"prompt": "hello"}) if junk[:1] == b"x" else GET)
        if junk[:1] != b"x":
            await read_body(reader)
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
        assert b"hello" in await read_body(reader)
        assert b"ok" in await read_body(reader)
        assert not b.scheduler.routed[0].tenant
        writer.close()


async def test_empty_lines_do_not_keep_a_connection(bench: MakeBench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "KEEP_ALIVE_SECONDS", 0.3)
    async with bench() as b, asyncio.timeout(10):
        reader, writer = await connect(b)
        writer.write(GET)
        await read_body(reader)
        writer.write(b"\r\n")
        assert await reader.read() == b""
        writer.close()


async def test_a_body_that_breaks_off_in_nonsense_is_told_so(bench: MakeBench) -> None:
    async with bench() as b:
        reader, writer = await connect(b)
        writer.write(CHUNKED % b"/v1/completions" + b"nonsense\r\n")
        assert (await reader.read()).startswith(b"HTTP/1.1 400")
        writer.close()


async def test_the_head_of_a_stream_without_end_is_all_that_is_sent_of_it(bench: MakeBench) -> None:
    async with bench() as b, asyncio.timeout(10):
        head = await b.http.head("/weft/fleet/events")
        assert (head.status_code, head.headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
        assert (await b.http.get("/health")).status_code == 200, "on the same connection"


BODY = json.dumps({"model": MODEL_NAME, "prompt": "hello"}).encode()
# as java.net.http.HttpClient sends it to every plain address
H2C = b"connection: Upgrade, HTTP2-Settings\r\nhttp2-settings: AAEAAEAAAAIAAAAB\r\nupgrade: h2c\r\n"
WEBSOCKET = b"connection: upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\n"


def post(offer: bytes) -> bytes:
    length = b"content-length: %d\r\n" % len(BODY)
    return b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n" + length + offer + b"\r\n"


async def replies(b: Bench, packets: list[bytes], count: int) -> list[bytes]:
    """Status lines of so many answers to what is sent; each packet after the server has read the one before."""
    reader, writer = await connect(b)
    for packet in packets:
        writer.write(packet)
        await writer.drain()
        await b.http.get("/health")
    found = []
    for _ in range(count):
        head = await reader.readuntil(b"\r\n\r\n")
        found.append(head.partition(b"\r\n")[0])
        (length,) = (line for line in head.split(b"\r\n") if line.startswith(b"content-length: "))
        await reader.readexactly(int(length.partition(b": ")[2]))
    writer.close()
    return found


@pytest.mark.parametrize("offer", [H2C, WEBSOCKET], ids=["h2c", "websocket"])
async def test_a_body_is_read_whatever_protocol_is_offered_with_it(bench: MakeBench, offer: bytes) -> None:
    async with bench() as b:
        assert await replies(b, [post(offer) + BODY], 1) == [b"HTTP/1.1 200 OK"]
        assert await replies(b, [post(offer), BODY[:9], BODY[9:]], 1) == [b"HTTP/1.1 200 OK"]
        assert b.decode.started[0].token_ids == b.decode.started[1].token_ids == b.ids("hello")


async def test_offers_on_one_connection_are_declined_one_after_the_other(bench: MakeBench) -> None:
    async with bench() as b:
        many = (b"GET /health HTTP/1.1\r\nhost: x\r\n" + H2C + b"\r\n") * 300
        assert await replies(b, [many + post(H2C) + BODY], 301) == [b"HTTP/1.1 200 OK"] * 301


async def test_a_tunnel_is_refused(bench: MakeBench) -> None:
    async with bench() as b:
        reader, writer = await connect(b)
        writer.write(b"CONNECT example.com:443 HTTP/1.1\r\nhost: x\r\n\r\nmore")
        assert (await reader.read()).startswith(b"HTTP/1.1 400 ")
        writer.close()
