"""How a service process fails to start, its error statuses, and its health service."""

from __future__ import annotations

import asyncio
import gc
import logging
import socket
import weakref
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tests.weft.rpc.bare_http2 import HEADERS, BareClient

from weft.errors import (
    BadCheckpoint,
    Cancelled,
    ConfigError,
    EngineFailed,
    InvalidRequest,
    NotFound,
    Overloaded,
    StorageUnavailable,
    WeftError,
)
from weft.metrics import expose
from weft.rpc import server
from weft.rpc.client import as_weft_error, cancelled_on_exit, open_channel
from weft.rpc.server import (
    NOT_SERVING,
    NUM_YOUNG_OBJECTS,
    SERVING,
    HealthService,
    RpcServer,
    freeze_startup_objects,
    run,
)
from weft_mesh.v1 import prefill_service_pb2 as pb2
from weft_mesh.v1 import prefill_service_pb2_grpc

SERVICE = "a.Service"
WATCH = "/grpc.health.v1.Health/Watch"


@pytest.mark.parametrize(
    "error", [ConfigError("WEFT_PORT='x': expected int"), BadCheckpoint("model.safetensors: short")]
)
@pytest.mark.parametrize("is_in_a_task", [False, True])
def test_what_another_start_cannot_mend_ends_with_status_2_and_one_line(
    error: Exception, is_in_a_task: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail() -> None:
        raise error

    async def main() -> None:
        if not is_in_a_task:
            await fail()
        async with asyncio.TaskGroup() as group:
            group.create_task(fail())

    with caplog.at_level(logging.ERROR), pytest.raises(SystemExit) as ended:
        run(main)
    assert ended.value.code == 2
    assert [record.getMessage() for record in caplog.records] == [f"cannot start: {error}"]


def test_storage_that_fails_ends_it_with_status_1_so_that_it_is_started_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main() -> None:
        raise StorageUnavailable("s3://models/one: timed out")

    with caplog.at_level(logging.ERROR), pytest.raises(SystemExit) as ended:
        run(main)
    assert ended.value.code == 1
    assert [record.getMessage() for record in caplog.records] == ["cannot start: s3://models/one: timed out"]


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


@pytest.mark.parametrize("is_for_metrics", [False, True])
def test_a_port_that_is_taken_ends_with_status_1_and_one_line(
    is_for_metrics: bool, taken: int, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        if is_for_metrics:
            expose("127.0.0.1", taken)
        await RpcServer([]).start("127.0.0.1", taken)

    with caplog.at_level(logging.ERROR), pytest.raises(SystemExit) as ended:
        run(main)
    assert ended.value.code == 1
    # not asyncio's, which tells of gRPC's poller and the loops of tests before
    (record,) = (each for each in caplog.records if each.name.startswith("weft"))
    assert f"cannot start: cannot listen on 127.0.0.1:{taken} for" in record.getMessage()


def test_other_failures_come_out_as_they_are() -> None:
    async def main() -> None:
        raise EngineFailed("a bug")

    with pytest.raises(EngineFailed, match="a bug"):
        run(main)


class Circle:
    """An object that refers to itself."""

    def __init__(self) -> None:
        self.own = self


def test_what_a_process_is_made_of_is_not_looked_at_for_cycles_and_what_requests_leave_is() -> None:
    threshold, made = gc.get_threshold(), [Circle() for _ in range(100)]
    try:
        freeze_startup_objects()
        assert not {id(each) for each in gc.get_objects()} & {id(each) for each in made}
        left = weakref.ref(Circle())
        kept = [[number] for number in range(2 * NUM_YOUNG_OBJECTS)]
        assert left() is None, len(kept)
    finally:
        gc.unfreeze()
        gc.set_threshold(*threshold)


class Servicer(prefill_service_pb2_grpc.PrefillServiceServicer):
    """Prefill is a coroutine that writes, ReadBlocks a generator."""

    def __init__(self, error: Exception | None) -> None:
        self.error = error
        self.has_ended = asyncio.Event()

    async def Prefill(self, request_iterator: Any, context: Any) -> None:  # type: ignore[override]
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._fail_or_wait())
                while True:
                    await context.write(pb2.PrefillResponse())
                    await asyncio.sleep(0)
        finally:
            self.has_ended.set()

    async def Embed(self, request: Any, context: Any) -> Any:
        raise NotImplementedError("nobody asks")

    async def ReadBlocks(self, request: Any, context: Any) -> AsyncIterator[pb2.ReadBlocksResponse]:
        try:
            while True:
                # more than any window holds: most of the time this is suspended at the yield
                yield pb2.ReadBlocksResponse(data=bytes(200_000))
                if self.error is not None:
                    raise self.error
        finally:
            self.has_ended.set()

    async def _fail_or_wait(self) -> None:
        if self.error is not None:
            raise self.error
        await asyncio.Event().wait()


@asynccontextmanager
async def start(error: Exception | None, servicer: Servicer | None = None) -> AsyncIterator[tuple[Servicer, Any]]:
    rpc, servicer = RpcServer([]), servicer or Servicer(error)
    prefill_service_pb2_grpc.add_PrefillServiceServicer_to_server(servicer, rpc.server)
    channel = open_channel(await rpc.start("127.0.0.1", 0))
    try:
        yield servicer, prefill_service_pb2_grpc.PrefillServiceStub(channel)
    finally:
        await channel.close()
        await rpc.stop(0)


@pytest.mark.parametrize("method", ["Prefill", "ReadBlocks"])
async def test_an_error_becomes_its_status(method: str) -> None:
    async with start(Overloaded("full")) as (_, stub):
        with pytest.raises(Overloaded, match="full"):
            await drain(stub, method)


async def test_an_error_may_name_a_file_whose_name_is_in_no_encoding() -> None:
    async with start(Overloaded("caf\udce9.txt: full")) as (_, stub):
        with pytest.raises(Overloaded, match=r"caf\\udce9\.txt: full"):
            await drain(stub, "ReadBlocks")


@pytest.mark.parametrize("name", ["x" * 100_000, "\u00e4" * 50_000])
@pytest.mark.parametrize("error", [NotFound, Overloaded])
async def test_an_error_may_name_what_has_a_very_long_name(error: type[WeftError], name: str) -> None:
    async with start(error(f"a file: tensor {name} is not there")) as (_, stub):
        with pytest.raises(error, match=r"^a file: tensor .{200,600} \.\.\. .{200,600} is not there$"):
            await drain(stub, "Prefill")


@pytest.mark.parametrize("name", ["x" * 100_000, "\u00e4" * 50_000])
async def test_an_error_may_be_of_a_field_with_a_very_long_name(name: str) -> None:
    async with start(InvalidRequest(f"{name} is not supported here", name)) as (_, stub):
        with pytest.raises(InvalidRequest, match=r"is not supported here$"):
            await drain(stub, "Prefill")


@pytest.mark.parametrize("method", ["Prefill", "ReadBlocks"])
async def test_an_unknown_error_says_nothing_of_itself(method: str) -> None:
    async with start(ValueError("a secret")) as (_, stub):
        with pytest.raises(EngineFailed) as raised:
            await drain(stub, method)
        assert "secret" not in str(raised.value)


@pytest.mark.parametrize("method", ["Prefill", "ReadBlocks"])
async def test_a_caller_that_leaves_ends_the_handler(method: str) -> None:
    async with start(None) as (servicer, stub):
        async with cancelled_on_exit(call(stub, method)) as stream:
            await anext(aiter(stream))
        async with asyncio.timeout(5):
            await servicer.has_ended.wait()


def call(stub: Any, method: str) -> Any:
    return stub.Prefill() if method == "Prefill" else stub.ReadBlocks(pb2.ReadBlocksRequest())


class Held:
    """An object that a handler refers to."""


class Forgetful(Servicer):
    """Fails while it refers to an object."""

    def __init__(self) -> None:
        super().__init__(None)
        self.held: weakref.ref[Held] | None = None

    async def Prefill(self, request_iterator: Any, context: Any) -> None:  # type: ignore[override]
        await self._fail()

    async def ReadBlocks(self, request: Any, context: Any) -> AsyncIterator[pb2.ReadBlocksResponse]:
        await self._fail()
        yield pb2.ReadBlocksResponse()

    async def _fail(self) -> None:
        held = Held()
        self.held = weakref.ref(held)
        try:
            raise NotFound("the first of two")
        except NotFound as error:
            raise Overloaded("full") from error


@pytest.mark.parametrize("method", ["Prefill", "ReadBlocks"])
async def test_a_call_that_failed_keeps_nothing_of_its_request(method: str) -> None:
    servicer = Forgetful()
    gc.disable()  # its work is not needed
    try:
        async with start(None, servicer) as (_, stub):
            with pytest.raises(Overloaded):
                await drain(stub, method)
            async with asyncio.timeout(5):
                while servicer.held is None or servicer.held() is not None:  # noqa: ASYNC110 (gRPC's own tasks let go)
                    await asyncio.sleep(0.01)
    finally:
        gc.enable()


async def drain(stub: Any, method: str) -> None:
    async with cancelled_on_exit(call(stub, method)) as stream:
        async for _ in stream:
            pass


def test_of_several_errors_the_one_that_says_more_counts() -> None:
    group = ExceptionGroup("", [ValueError("x"), ExceptionGroup("", [NotFound("gone")])])
    mapped = as_weft_error(group)
    assert isinstance(mapped, NotFound)
    assert isinstance(mapped, WeftError)
    assert isinstance(as_weft_error(TimeoutError()), WeftError)
    assert grpc.StatusCode.NOT_FOUND.value[0] == NotFound.code


@asynccontextmanager
async def listening() -> AsyncIterator[tuple[RpcServer, str, Any]]:
    """Start a listener; yield its health service and a client stub."""
    rpc = RpcServer([SERVICE])
    address = await rpc.start("127.0.0.1", 0)
    try:
        async with asyncio.timeout(20), grpc.aio.insecure_channel(address) as channel:
            yield rpc, address, health_pb2_grpc.HealthStub(channel)
    finally:
        async with asyncio.timeout(20):
            await rpc.stop(0)


def asked(service: str) -> health_pb2.HealthCheckRequest:
    return health_pb2.HealthCheckRequest(service=service)


@pytest.mark.parametrize("service", ["", SERVICE])
async def test_who_watches_hears_of_every_change_and_of_nothing_else(service: str) -> None:
    async with listening() as (rpc, _, health):
        watch = health.Watch(asked(service))
        assert (await watch.read()).status == NOT_SERVING
        for ready in (True, True, False, False, True):
            await rpc.set_ready(ready)
            expected = SERVING if ready else NOT_SERVING
            assert (await health.Check(asked(service))).status == expected
        # what is read is what has become of it; in between there may have been more
        while (await watch.read()).status != SERVING:
            pass
        watch.cancel()


async def test_a_service_that_is_not_there_is_unknown() -> None:
    async with listening() as (_, _, health):
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await health.Check(asked("another"))
        assert refusal.value.code() is grpc.StatusCode.NOT_FOUND
        watch = health.Watch(asked("another"))
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
        watch.cancel()


async def test_a_watcher_that_takes_no_byte_holds_up_neither_readiness_nor_the_end() -> None:
    async with listening() as (rpc, address, health), BareClient(address, window=0) as client:
        client.call(WATCH)
        await client.first(HEADERS)  # the first status is on its way, and stays there
        async with asyncio.timeout(5):
            await rpc.set_ready(True)
        assert (await health.Check(asked(""))).status == SERVING


async def test_nobody_is_woken_where_nothing_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[str] = []

    def status(_: HealthService, name: str) -> int:
        looks.append(name)
        return NOT_SERVING

    monkeypatch.setattr(HealthService, "_status", status)
    health, written = HealthService([SERVICE]), asyncio.Event()

    class Context:
        async def write(self, _: Any) -> None:
            written.set()

    watch = asyncio.create_task(health.Watch(asked(SERVICE), Context()))
    await written.wait()
    for ready, num_looks in ((False, 1), (False, 1), (True, 2), (True, 2)):
        health.set_ready(ready)
        for _ in range(3):
            await asyncio.sleep(0)
        assert len(looks) == num_looks
    watch.cancel()


async def test_a_watcher_that_does_not_read_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "SLOW_READER_SECONDS", 0.01)

    class Context:
        async def write(self, _: Any) -> None:
            await asyncio.Event().wait()

    with pytest.raises(Cancelled):
        await HealthService([SERVICE]).Watch(asked(SERVICE), Context())
