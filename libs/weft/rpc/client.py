"""Channels, and streams that are cancelled when their scope ends.

A grpc.aio stream that is merely dropped keeps running on the server, so every stream goes through `owned`.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, TypeVar

import grpc

from weft.config import ConfigError
from weft.rpc.status import raise_as_weft
from weft.rpc.tls import MESH_NAME, channel_credentials

logger = logging.getLogger(__name__)
MAX_MESSAGE_BYTES = 32 * 1024 * 1024
CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # a peer that is frozen or unplugged is noticed without traffic, 0.7 to 1 s after its last word (measured); pings
    # are answered by threads of the library's own, so that one whose Python is busy for long is not taken for frozen
    ("grpc.keepalive_time_ms", 250),
    ("grpc.keepalive_timeout_ms", 700),
    # without this one a frozen peer is noticed after a minute, whatever the two above say (measured, grpcio 1.85)
    ("grpc.http2.ping_timeout_ms", 700),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # a restarted peer on the same port is found again quickly
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # also how long one try to connect may take: the kernel accepts for a frozen peer, which then says nothing
    ("grpc.min_reconnect_backoff_ms", 1_000),
    # a proxy named in the environment leads to the world outside, not to peers
    ("grpc.enable_http_proxy", 0),
)
CallT = TypeVar("CallT")


def open_channel(address: str) -> grpc.aio.Channel:
    """A channel to a peer at host:port; connects lazily. The caller closes it. With the mesh's certificate where there
    is one; raises ConfigError when that cannot be read.

    Several by commas are one service: calls go to the first that answers, and to another when it is gone. gRPC looks a
    single name up by itself, and again when it has lost it; of several, names are looked up here, once. Raises
    ConfigError when nothing is found.
    """
    target = _one_target(address) if "," in address else address
    options: list[tuple[str, int | str]] = list(CHANNEL_OPTIONS)
    credentials = channel_credentials()
    if credentials is None:
        return grpc.aio.insecure_channel(target, options=options)
    options.append(("grpc.ssl_target_name_override", MESH_NAME))
    return grpc.aio.secure_channel(target, credentials, options=options)


def _one_target(addresses: str) -> str:
    """All of them as gRPC takes several: as IP addresses, of one kind."""
    found: dict[int, list[str]] = {socket.AF_INET: [], socket.AF_INET6: []}
    for address in addresses.split(","):
        host, _, port = address.strip().rpartition(":")
        try:
            infos = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
        except OSError as error:
            # known again later, perhaps: the others are what several are for
            logger.warning("passed over, cannot be looked up: %s (%s)", address, error)
            continue
        for family, *_, where in infos:
            if family in found:
                ip = f"[{where[0]}]" if family == socket.AF_INET6 else where[0]
                found[family].append(f"{ip}:{port}")
    for family, scheme in ((socket.AF_INET, "ipv4"), (socket.AF_INET6, "ipv6")):
        if found[family]:
            return f"{scheme}:{','.join(dict.fromkeys(found[family]))}"
    raise ConfigError(f"none of {addresses!r} can be looked up; is WEFT_SCHEDULER_ADDR right?")


@asynccontextmanager
async def owned(call: CallT) -> AsyncIterator[CallT]:
    """A streaming call, cancelled on the way out whatever the way; RPC errors come out as WeftError."""
    handle: Any = call
    try:
        yield call
    except grpc.aio.AioRpcError as error:
        raise_as_weft(error)
    finally:
        handle.cancel()
        # when the other side has ended the call first, cancel() leaves the task that reads our request iterator waiting
        if (reader := getattr(handle, "_async_request_poller", None)) is not None:
            reader.cancel()


@contextmanager
def translated() -> Iterator[None]:
    """For unary calls: RPC errors come out as WeftError."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise_as_weft(error)


class ChannelPool:
    """One channel a peer address, opened on first use and closed together."""

    def __init__(self) -> None:
        self._channels: dict[str, grpc.aio.Channel] = {}

    def get(self, address: str) -> grpc.aio.Channel:
        """The channel to host:port."""
        if address not in self._channels:
            self._channels[address] = open_channel(address)
        return self._channels[address]

    async def drop(self, address: str) -> None:
        """Forget a peer that has gone."""
        if (channel := self._channels.pop(address, None)) is not None:
            await channel.close()

    async def close(self) -> None:
        """Close all."""
        for address in list(self._channels):
            await self.drop(address)
