"""Streams to decode workers: one attempt at reaching a worker is that of all who wait for it."""

from __future__ import annotations

import asyncio
import socket

import pytest

from weft.errors import PeerLost
from weft.request import WorkerAddress
from weft_services.gateway.mesh import links
from weft_services.gateway.mesh.links import DecodeLinks
from weft_services.gateway.mesh.peers import DecodeLink

NUM_REQUESTS = 40


@pytest.fixture
def attempts(monkeypatch: pytest.MonkeyPatch) -> list[DecodeLink]:
    """Every stream that is begun, in order."""
    begun: list[DecodeLink] = []

    class Counted(DecodeLink):
        async def connect(self) -> None:
            begun.append(self)
            await super().connect()

    monkeypatch.setattr(links, "DecodeLink", Counted)
    return begun


async def test_who_waits_for_a_frozen_worker_shares_one_attempt(attempts: list[DecodeLink]) -> None:
    # its kernel takes connections, and nobody ever reads from them: a process that was stopped
    with socket.create_server(("127.0.0.1", 0)) as frozen:
        worker = WorkerAddress("decode-0", "boot", f"127.0.0.1:{frozen.getsockname()[1]}")
        async with asyncio.TaskGroup() as group:
            streams = DecodeLinks(group)
            asked = [streams.get(worker) for _ in range(NUM_REQUESTS)]
            outcomes = await asyncio.gather(*asked, return_exceptions=True)
            assert [str(each) for each in outcomes] == ["decode-0 cannot be reached"] * NUM_REQUESTS
            assert all(isinstance(each, PeerLost) and each.worker_id == "decode-0" for each in outcomes)
            assert len(attempts) == 1
            # the next request tries anew
            with pytest.raises(PeerLost):
                await streams.get(worker)
            assert len(attempts) == 2


async def test_a_request_that_leaves_takes_nobody_with_it(attempts: list[DecodeLink]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as frozen:
        worker = WorkerAddress("decode-0", "boot", f"127.0.0.1:{frozen.getsockname()[1]}")
        async with asyncio.TaskGroup() as group:
            streams = DecodeLinks(group)
            leaving, staying = (group.create_task(_outcome(streams, worker)) for _ in range(2))
            for _ in range(3):  # until both wait
                await asyncio.sleep(0)
            assert len(attempts) == 1
            leaving.cancel()
            assert isinstance(await staying, PeerLost)
            assert leaving.cancelled()
            assert len(attempts) == 1


async def test_a_gateway_that_closes_waits_for_no_worker(attempts: list[DecodeLink]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as frozen:
        worker = WorkerAddress("decode-0", "boot", f"127.0.0.1:{frozen.getsockname()[1]}")
        async with asyncio.TaskGroup() as group:
            streams = DecodeLinks(group)
            asked = group.create_task(_outcome(streams, worker))
            for _ in range(3):
                await asyncio.sleep(0)
            assert len(attempts) == 1
            streams.close()
            assert str(await asked) == "the gateway is shutting down"


async def _outcome(streams: DecodeLinks, worker: WorkerAddress) -> DecodeLink | PeerLost:
    try:
        return await streams.get(worker)
    except PeerLost as error:
        return error
