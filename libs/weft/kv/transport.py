"""Interface of KV transports. A transport only pulls: no peer writes into our pool."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from weft.request import RequestKey


@dataclass(frozen=True, slots=True)
class Endpoint:
    """How to reach a peer's pool.

    - `segment`: the transport's own name for the peer; empty for gRPC.
    - `file`: the pool's file for processes on the peer's machine, independent of the transport; empty without one.
    """

    transport: str
    segment: str
    pool_address: int
    file: str = ""


@dataclass(frozen=True, slots=True)
class KvSource:
    """Where to pull from: the peer's pool, its gRPC listener, and the lease that allows reading."""

    endpoint: Endpoint
    address: str
    lease: RequestKey


@dataclass(frozen=True, slots=True)
class CopyRange:
    """Bytes to copy from `remote_address` in the peer's memory to `local_address` in ours."""

    remote_address: int
    local_address: int
    size_bytes: int


class TransferFailed(Exception):
    """A pull that did not complete. It has ended: nothing is written any more."""


class Transport(Protocol):
    """One kind of transfer. Prefill registers and advertises its pool; decode pulls."""

    @property
    def name(self) -> str:
        """Metric label: "local", "mooncake", "mooncake_rdma" or "grpc"."""

    def register(self, address: int, size_bytes: int) -> None:
        """Make our pool readable by peers and writable by our own pulls. Called once at start."""

    def endpoint(self) -> Endpoint:
        """Return the address that peers need to pull from us."""

    def reaches(self, peer: Endpoint) -> bool:
        """True if this transport can read from there. Does not wait for the peer."""

    async def connect(self, peer: Endpoint) -> None:
        """Connect ahead of need. Never raises: a dead peer shows at the first pull."""

    async def pull(self, source: KvSource, runs: Sequence[CopyRange], timeout_seconds: float) -> None:
        """Copy all ranges, or raise TransferFailed.

        Returns or raises only once nothing can be written any more, which may be much later than the timeout. Blocks
        are reused on that guarantee. Cancelling does not stop the transfer: run it in its own task and await that with
        your own timeout.
        """

    async def close(self) -> None:
        """Unregister the pool and release resources."""


def coalesce(runs: Sequence[CopyRange]) -> list[CopyRange]:
    """Join ranges that are adjacent on both sides, in order."""
    joined: list[CopyRange] = []
    for run in runs:
        last = joined[-1] if joined else None
        if (
            last is not None
            and last.remote_address + last.size_bytes == run.remote_address
            and last.local_address + last.size_bytes == run.local_address
        ):
            joined[-1] = CopyRange(last.remote_address, last.local_address, last.size_bytes + run.size_bytes)
        else:
            joined.append(run)
    return joined
