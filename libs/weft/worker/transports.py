"""Which transport this worker pulls with: chosen once, at start, and said out loud."""

from __future__ import annotations

import logging

from weft.config import ConfigError
from weft.kv.mooncake import MooncakeTransport, MooncakeUnavailable
from weft.kv.transport import Transport
from weft.rpc.blocks import GrpcTransport
from weft.worker.config import MooncakeProtocol, TransportChoice

logger = logging.getLogger(__name__)


def pick_transports(
    choice: TransportChoice, host: str, protocol: MooncakeProtocol, fallback: GrpcTransport, pool_bytes: int
) -> tuple[Transport, ...]:
    """The one in use first, gRPC always last, the pool registered with all.

    Raises ConfigError when Mooncake is demanded and cannot be had.
    """
    transports: list[Transport] = [fallback]
    pool_address = fallback.endpoint().pool_address
    if choice is not TransportChoice.GRPC:
        try:
            mooncake = MooncakeTransport(host, protocol)
            mooncake.register(pool_address, pool_bytes)
            transports.insert(0, mooncake)
        except MooncakeUnavailable as error:
            if choice is TransportChoice.MOONCAKE:
                raise ConfigError(f"WEFT_TRANSPORT=mooncake, but: {error}") from error
            logger.warning("KV TRANSPORT FALLS BACK TO GRPC: mooncake is unavailable: %s", error)
    fallback.register(pool_address, pool_bytes)
    logger.info("KV transport: %s, pool of %.1f MiB", transports[0].name, pool_bytes / 2**20)
    return tuple(transports)
