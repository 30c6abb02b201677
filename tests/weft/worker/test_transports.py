"""Which transport a worker ends up with."""

from __future__ import annotations

import ctypes
import logging
from pathlib import Path

import pytest

from weft.errors import ConfigError
from weft.kv import local_transport
from weft.kv.memfd import SharedMemory, create_shared_memory
from weft.kv.memory import BlockBytes, HostBlocks
from weft.kv.mooncake import MooncakeUnavailable
from weft.kv.transport import Endpoint, Transport
from weft.options import TransportChoice
from weft.rpc.client import ChannelPool
from weft.rpc.grpc_transport import GrpcTransport
from weft.worker import kv_pull
from weft.worker.kv_pull import advertised_endpoint, choose_transports, needs_checksums

POOL = (ctypes.c_ubyte * 8192)()


def pick_for(choice: TransportChoice, memory: BlockBytes) -> tuple[Transport, ...]:
    return choose_transports(choice, "127.0.0.1", GrpcTransport(ChannelPool(), memory), memory)


def pick(choice: TransportChoice) -> list[str]:
    memory = HostBlocks(ctypes.addressof(POOL), 4096, 2)
    return [transport.name for transport in pick_for(choice, memory)]


@pytest.fixture
def shared() -> SharedMemory:
    """A pool in a file, as those of CPU workers are."""
    pool = create_shared_memory(8192, "weft-kv-pool")
    assert pool is not None
    return pool


def blocks_of(shared: SharedMemory) -> HostBlocks:
    return HostBlocks(ctypes.addressof(ctypes.c_ubyte.from_buffer(shared.mapping)), 4096, 2, shared.fd)


def unavailable(host: str, protocol: str) -> None:
    raise MooncakeUnavailable("libibverbs.so.1 is missing")


def test_mooncake_goes_first_and_grpc_is_always_there() -> None:
    assert pick(TransportChoice.AUTO) == ["mooncake", "grpc"]
    assert pick(TransportChoice.MOONCAKE) == ["mooncake", "grpc"]


def test_a_pool_in_a_file_is_told_beside_the_way_for_other_machines(shared: SharedMemory) -> None:
    picked = pick_for(TransportChoice.AUTO, blocks_of(shared))
    assert [transport.name for transport in picked] == ["local", "mooncake", "grpc"]
    endpoint = advertised_endpoint(picked)
    assert (endpoint.transport, endpoint.segment) == ("mooncake", picked[1].endpoint().segment)
    # who is on this machine goes by the file, who is not by what its transport says
    assert [transport.reaches(endpoint) for transport in picked] == [True, True, True]
    elsewhere = Endpoint(
        endpoint.transport, endpoint.segment, endpoint.pool_address, "1/fd/3 " + "/memfd:x-" + 32 * "0"
    )
    assert [transport.reaches(elsewhere) for transport in picked] == [False, True, True]


def test_where_open_files_are_not_shown_workers_of_one_machine_are_peers_like_others(
    shared: SharedMemory, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(local_transport, "OPEN_FILES", tmp_path)
    picked = pick_for(TransportChoice.AUTO, blocks_of(shared))
    assert [transport.name for transport in picked] == ["mooncake", "grpc"]
    assert advertised_endpoint(picked).file == ""


@pytest.mark.parametrize("choice", [TransportChoice.MOONCAKE, TransportChoice.GRPC])
def test_a_transport_that_is_demanded_is_used_on_the_same_machine_too(
    choice: TransportChoice, shared: SharedMemory
) -> None:
    picked = pick_for(choice, blocks_of(shared))
    assert "local" not in [transport.name for transport in picked]
    assert (advertised_endpoint(picked).transport, advertised_endpoint(picked).file) == (choice.value, "")


def test_grpc_alone_when_asked_for() -> None:
    assert pick(TransportChoice.GRPC) == ["grpc"]


def test_without_mooncake_auto_falls_back_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(kv_pull, "MooncakeTransport", unavailable)
    with caplog.at_level(logging.WARNING):
        assert pick(TransportChoice.AUTO) == ["grpc"]
    assert "libibverbs" in caplog.text


def test_mooncake_that_is_demanded_and_missing_is_an_error_of_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_pull, "MooncakeTransport", unavailable)
    with pytest.raises(ConfigError, match="WEFT_TRANSPORT"):
        pick(TransportChoice.MOONCAKE)


@pytest.mark.parametrize(
    ("transport", "has_checksums"), [("local", True), ("mooncake", True), ("mooncake_rdma", False), ("grpc", True)]
)
def test_blocks_have_checksums_unless_rdma_carries_them(transport: str, has_checksums: bool) -> None:
    assert needs_checksums(transport) is has_checksums
