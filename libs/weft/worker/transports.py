"""Which transports this worker pulls with: chosen once, at start, and said out loud."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from weft.config import ConfigError
from weft.kv.memory import BlockBytes
from weft.kv.mooncake import MooncakeTransport, MooncakeUnavailable
from weft.kv.near import NearTransport
from weft.kv.transport import Endpoint, Transport
from weft.rpc.blocks import GrpcTransport
from weft.worker.config import MooncakeProtocol, TransportChoice

logger = logging.getLogger(__name__)


def pick_transports(
    choice: TransportChoice, host: str, protocol: MooncakeProtocol, fallback: GrpcTransport, memory: BlockBytes
) -> tuple[Transport, ...]:
    """The nearest first, gRPC always last, the pool registered with all.

    Raises ConfigError when Mooncake is demanded and cannot be had.
    """
    transports: list[Transport] = [fallback]
    pool_bytes = memory.num_blocks * memory.block_bytes
    if choice is not TransportChoice.GRPC:
        try:
            mooncake = MooncakeTransport(host, protocol)
            mooncake.register(memory.address, pool_bytes)
            transports.insert(0, mooncake)
        except MooncakeUnavailable as error:
            if choice is TransportChoice.MOONCAKE:
                raise ConfigError(f"WEFT_TRANSPORT=mooncake, but: {error}") from error
            logger.warning("KV TRANSPORT FALLS BACK TO GRPC: mooncake is unavailable: %s", error)
    fallback.register(memory.address, pool_bytes)
    if choice is TransportChoice.AUTO and memory.shared_fd is not None:
        try:
            transports.insert(0, NearTransport(memory))
        except OSError as error:
            logger.info("workers on this machine are peers like others: open files are not shown: %s", error)
    names = [transport.name for transport in transports]
    logger.info("KV transport: %s, pool of %.1f MiB", " before ".join(names), pool_bytes / 2**20)
    return tuple(transports)


def lent_endpoint(transports: Sequence[Transport]) -> Endpoint:
    """What peers are told of our pool: the first way that leads to other machines, and its file for this one."""
    first = transports[0]
    return first.beside(transports[1].endpoint()) if isinstance(first, NearTransport) else first.endpoint()
