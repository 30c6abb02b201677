"""Requests that offer another protocol are answered as if they offered none."""

from __future__ import annotations

import json

import pytest

from tests.services.gateway.conftest import MODEL_NAME, Bench, MakeBench
from tests.services.gateway.test_disconnect import connect

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
