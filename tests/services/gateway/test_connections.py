"""Connection limits and disconnects: heads, trailers, upgrades, keep-alive, slow readers and clients that leave."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest
import uvicorn
from starlette.applications import Starlette

from tests.services.gateway.conftest import END, MODEL_NAME, Bench, MakeBench
from tests.services.gateway.fakes import LENGTH, SequenceDelta, Start, deltas, forever, speaking
from weft.errors import Overloaded
from weft.request import RequestKey
from weft_services.gateway.front import endpoints, http_server
from weft_services.gateway.front.asgi_io import unless_disconnected
from weft_services.gateway.front.http_server import MAX_HEAD_BYTES
from weft_services.gateway.mesh.decode_connection import SequenceUpdate, UpdateQueue

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


# of an answer that nobody reads to its end
ENDLESS = 1 << 22


def request_bytes(stream: bool, max_tokens: int = 100) -> bytes:
    """A whole HTTP request as a client would write it."""
    body = f'{{"model":"{MODEL_NAME}","prompt":"x","stream":{str(stream).lower()},"max_tokens":{max_tokens}}}'.encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
    return head.encode() + b"\r\n\r\n" + body


async def connect(b: Bench) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A bare connection, of which the kernel keeps little for a reader that does not come."""
    host, _, port = b.gateway.http_address.partition(":")
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, (host, int(port)))
    return await asyncio.open_connection(sock=sock, limit=1024)


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "unstreamed"])
async def test_a_client_that_leaves_cancels_in_the_engine(bench: MakeBench, stream: bool) -> None:
    async with bench() as b:
        b.decode.script = speaking(b.ids("hello"), finish=None)
        reader, writer = await connect(b)
        writer.write(request_bytes(stream))
        await b.decode.until(lambda: len(b.decode.started) == 1)
        if stream:
            await reader.readuntil(b"data: ")
        writer.close()
        await b.decode.until(lambda: b.decode.cancelled == [b.decode.started[0].key.request_id])
        await b.scheduler.until(lambda: b.scheduler.stages()[-1:] == ["cancelled"])
        assert b.gateway.pipeline.num_in_flight == 0


async def test_a_client_that_leaves_while_it_is_being_placed_frees_its_booking(bench: MakeBench) -> None:
    async with bench() as b:
        b.scheduler.is_stuck = True
        _, writer = await connect(b)
        writer.write(request_bytes(stream=True))
        await b.scheduler.until(lambda: len(b.scheduler.routed) == 1)
        writer.close()
        await b.scheduler.until(lambda: b.scheduler.stages() == ["cancelled"])
        assert b.decode.started == []


async def test_a_client_that_does_not_read_is_cut_off(bench: MakeBench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "SLOW_READER_SECONDS", 0.05)
    async with bench(context=2 * ENDLESS) as b:

        async def flood(start: Start) -> AsyncIterator[SequenceDelta]:
            token = b.ids("x" * 8)
            for delta in deltas(start, token, finish=None):
                yield delta
            while True:
                yield SequenceDelta(key=start.key, token_ids=token * 200)

        b.decode.script = flood
        _, writer = await connect(b)
        writer.write(request_bytes(stream=True, max_tokens=ENDLESS))
        await b.decode.until(lambda: len(b.decode.cancelled) == 1)
        await b.scheduler.until(lambda: b.scheduler.stages()[-1:] == ["cancelled"])
        writer.close()


async def test_a_client_that_does_not_read_delays_nobody_and_is_kept_a_bounded_rest(bench: MakeBench) -> None:
    async with bench(context=2 * ENDLESS) as b:

        async def flood_or_answer(start: Start) -> AsyncIterator[SequenceDelta]:
            """Sequences of one worker share its stream."""
            if start.sampling.max_tokens < 100:
                for delta in deltas(start, [*b.ids("hello"), END]):
                    yield delta
                return
            for delta in deltas(start, b.ids("x" * 8), finish=None):
                yield delta
            many = b.ids("xyz" * 70)
            while True:
                yield SequenceDelta(key=start.key, token_ids=many)

        b.decode.script = flood_or_answer
        _, writer = await connect(b)
        writer.write(request_bytes(stream=True, max_tokens=ENDLESS))
        await b.decode.until(lambda: len(b.decode.started) == 1)
        for _ in range(5):
            answer = await b.client.completions.create(model=MODEL_NAME, prompt="x", max_tokens=20)
            assert answer.choices[0].text == "hello"
        # what the client has not taken is bounded: the engine is let go, some thousand frames later, before the slow
        # reader's own time is over
        await b.decode.until(lambda: len(b.decode.cancelled) == 1, http_server.SLOW_READER_SECONDS - 5)
        writer.close()


class Pipe(asyncio.Transport):
    """A connection with so many bytes that its client has not taken."""

    num_unread = 0
    is_cut_off = False

    def get_write_buffer_size(self) -> int:
        return self.num_unread

    def abort(self) -> None:
        self.is_cut_off = True

    def close(self) -> None:
        pass


async def test_who_takes_a_long_answer_slowly_is_not_taken_for_one_that_does_not_read() -> None:
    config = uvicorn.Config(Starlette(), log_config=None)
    pipe, connection = Pipe(), http_server.BoundedProtocol(config, uvicorn.server.ServerState(), {})
    connection.connection_made(pipe)
    pipe.num_unread = 8_000_000
    connection.pause_writing()
    for is_read in (True, True, True, False):
        pipe.num_unread -= 1_000_000 if is_read else 0
        assert connection._reader_timer is not None
        connection._reader_timer._run()  # its time is over
        assert pipe.is_cut_off is not is_read
    connection.connection_lost(None)


async def test_an_inbox_is_bounded() -> None:
    inbox = UpdateQueue(max_deltas=2)
    for _ in range(3):
        inbox.append(SequenceUpdate(RequestKey("a")))
    with pytest.raises(Overloaded):
        await inbox.wait()


async def test_choices_that_are_not_placed_yet_cost_the_others_nothing(
    bench: MakeBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with bench() as b:
        said, route = b.ids("x") * 100, b.scheduler.Route

        async def at_once(start: Start) -> AsyncIterator[list[SequenceDelta]]:
            yield deltas(start, said, LENGTH)

        async def last_waits(request: Any, context: Any) -> Any:
            if len(b.scheduler.routed) == 63:
                await b.decode.until(lambda: len(b.decode.started) == 63 or bool(b.decode.cancelled))
                while b.decode.num_said < 6300 and not b.decode.cancelled:  # noqa: ASYNC110 (no event to await)
                    await asyncio.sleep(0.005)
            return await route(request, context)

        b.decode.script = at_once
        monkeypatch.setattr(b.scheduler, "Route", last_waits)
        body = {"model": MODEL_NAME, "prompt": ["x"] * 64, "max_tokens": len(said)}
        answer = await b.http.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == 6400


async def test_a_long_silence_is_bridged_by_comments(bench: MakeBench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoints, "IDLE_SECONDS", 0.02)
    async with bench() as b:

        async def silent(start: Start) -> AsyncIterator[SequenceDelta]:
            await forever()
            yield SequenceDelta()

        b.decode.script = silent
        reader, writer = await connect(b)
        writer.write(request_bytes(stream=True))
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200")
        await reader.readuntil(b": keep-alive\n\n")
        await reader.readuntil(b": keep-alive\n\n")
        writer.close()


async def test_tokens_that_nobody_hears_of_are_bridged_too(bench: MakeBench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoints, "IDLE_SECONDS", 0.05)
    async with bench(tool_format="hermes") as b:
        call, letter = b.ids('<tool_call>{"name": "'), b.ids("n")

        async def naming(start: Start) -> AsyncIterator[SequenceDelta]:
            for number in range(400):  # a name that does not end: the parser holds it back
                await asyncio.sleep(0.005)
                yield SequenceDelta(key=start.key, token_ids=letter if number else call)

        b.decode.script = naming
        tool = {"type": "function", "function": {"name": "n"}}
        body = {"model": MODEL_NAME, "messages": [{"role": "user", "content": "x"}], "tools": [tool], "stream": True}
        num_heard = num_bridged = 0
        async with b.http.stream("POST", "/v1/chat/completions", json=body) as response:
            async for line in response.aiter_lines():
                num_heard += line.startswith("data: ")
                num_bridged += line == ": keep-alive"
                if num_bridged == 2:
                    break
        assert (num_heard, num_bridged) == (1, 2), "the role, and then nothing"


async def test_a_client_that_leaves_ends_the_work_and_nothing_else() -> None:
    ended: list[str] = []

    async def leaves() -> dict[str, str]:
        return {"type": "http.disconnect"}

    async def works() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            ended.append("work")
            raise

    async with asyncio.timeout(10):
        await unless_disconnected(leaves, works())
        await asyncio.sleep(0)  # the task itself goes on
    assert ended == ["work"]


async def test_a_cancellation_from_elsewhere_and_an_error_of_the_work_go_on() -> None:
    async def stays() -> dict[str, str]:
        await asyncio.Event().wait()
        raise AssertionError("it is cancelled before")

    async def fails() -> None:
        raise ValueError("the work's own")

    with pytest.raises(ValueError, match="the work's own"):
        await unless_disconnected(stays, fails())
    task = asyncio.create_task(unless_disconnected(stays, asyncio.sleep(60)))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
