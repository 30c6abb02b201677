"""Handlers of both styles: their errors become statuses, and their ends come at once when the caller leaves."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from weft.errors import EngineFailed, InvalidRequest, NotFound, Overloaded, WeftError
from weft.rpc.client import cancelled_on_exit, open_channel
from weft.rpc.server import RpcServer
from weft.rpc.status import as_weft_error
from weft_mesh.v1 import prefill_service_pb2 as pb2
from weft_mesh.v1 import prefill_service_pb2_grpc


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
    """gRPC does not carry it, and the caller heard of an overload."""
    async with start(error(f"a file: tensor {name} is not there")) as (_, stub):
        with pytest.raises(error, match=r"^a file: tensor .{200,600} \.\.\. .{200,600} is not there$"):
            await drain(stub, "Prefill")


@pytest.mark.parametrize("name", ["x" * 100_000, "\u00e4" * 50_000])
async def test_an_error_may_be_of_a_field_with_a_very_long_name(name: str) -> None:
    """A client's own, such as of structured_outputs: the client was told to come again."""
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
    """Either of them."""
    return stub.Prefill() if method == "Prefill" else stub.ReadBlocks(pb2.ReadBlocksRequest())


class Held:
    """What a handler works on."""


class Forgetful(Servicer):
    """Fails with something in its hands."""

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
    """To the end."""
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
