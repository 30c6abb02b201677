"""The seam below which block bytes move. A transport only ever pulls: no peer writes into our pool."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from weft.request import RequestKey


@dataclass(frozen=True, slots=True)
class Endpoint:
    """How a peer's pool is reached. `segment` is the transport's own name for the peer; empty for gRPC.

    `file`: the pool's file as processes of the peer's machine find it, whatever the transport; empty for none.
    """

    transport: str
    segment: str
    pool_address: int
    file: str = ""


@dataclass(frozen=True, slots=True)
class KvSource:
    """Whom we pull from: its pool, the gRPC listener beside it, and the lease under which we may read."""

    endpoint: Endpoint
    address: str
    lease: RequestKey


@dataclass(frozen=True, slots=True)
class CopyRange:
    """Bytes to copy: from `remote_address` in the peer's memory to `local_address` in ours."""

    remote_address: int
    local_address: int
    size_bytes: int


class TransferFailed(Exception):
    """A pull that did not complete. Like one that did, it has ended: nothing is written any more."""


class Transport(Protocol):
    """Used by both sides: the lender registers and advertises, the borrower pulls."""

    @property
    def name(self) -> str:
        """Metric label: "local", "mooncake", "mooncake_rdma" or "grpc"."""

    def register(self, address: int, size_bytes: int) -> None:
        """Make our pool readable by peers and writable by our own pulls. Once, at start."""

    def endpoint(self) -> Endpoint:
        """What peers need to pull from us."""

    def reaches(self, peer: Endpoint) -> bool:
        """Can this transport read there. Does not wait for the peer."""

    async def connect(self, peer: Endpoint) -> None:
        """Open the peer ahead of need. Never raises: a dead peer shows at the first pull."""

    async def pull(self, source: KvSource, runs: Sequence[CopyRange], timeout_seconds: float) -> None:
        """Copy all runs, or raise TransferFailed.

        Returns or raises only once nothing can be written any more, which may be much later than the timeout: that is
        the proof on which blocks are used again. Cancelling it does not stop the bytes: let it run in a task of its
        own, and wait for that with patience of your own.
        """

    async def close(self) -> None:
        """Unregister and stop."""


def coalesce(runs: Sequence[CopyRange]) -> list[CopyRange]:
    """Join runs that are neighbours on both sides, order kept."""
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
