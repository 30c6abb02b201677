"""Which transport a worker ends up with."""

from __future__ import annotations

import ctypes
import logging

import pytest

from weft.config import ConfigError
from weft.kv.memory import HostBlocks
from weft.kv.mooncake import MooncakeUnavailable
from weft.rpc.blocks import GrpcTransport
from weft.rpc.client import ChannelPool
from weft.worker import transports
from weft.worker.config import MooncakeProtocol, TransportChoice
from weft.worker.transports import pick_transports

POOL = (ctypes.c_ubyte * 8192)()


def pick(choice: TransportChoice) -> list[str]:
    memory = HostBlocks(ctypes.addressof(POOL), 4096, 2)
    picked = pick_transports(choice, "127.0.0.1", MooncakeProtocol.TCP, GrpcTransport(ChannelPool(), memory), 8192)
    return [transport.name for transport in picked]


def unavailable(host: str, protocol: str) -> None:
    raise MooncakeUnavailable("libibverbs.so.1 is missing")


def test_mooncake_goes_first_and_grpc_is_always_there() -> None:
    assert pick(TransportChoice.AUTO) == ["mooncake", "grpc"]
    assert pick(TransportChoice.MOONCAKE) == ["mooncake", "grpc"]


def test_grpc_alone_when_asked_for() -> None:
    assert pick(TransportChoice.GRPC) == ["grpc"]


def test_without_mooncake_auto_falls_back_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(transports, "MooncakeTransport", unavailable)
    with caplog.at_level(logging.WARNING):
        assert pick(TransportChoice.AUTO) == ["grpc"]
    assert "libibverbs" in caplog.text


def test_mooncake_that_is_demanded_and_missing_is_an_error_of_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transports, "MooncakeTransport", unavailable)
    with pytest.raises(ConfigError, match="WEFT_TRANSPORT"):
        pick(TransportChoice.MOONCAKE)
