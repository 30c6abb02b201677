"""Messages between prefill and decode during a KV transfer, as values; `weft.rpc.transfer_wire` encodes them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from weft.kv.transport import Endpoint
from weft.request import KEEP, ModelFingerprint, PositionLogprobs, RequestKey, Retention, SamplingParams

# Messages that each side sends in the time of a lease, which is the silence that ends a transfer.
HEARTBEATS_PER_LEASE = 3


def is_superseded(key: RequestKey, living: Iterable[RequestKey]) -> bool:
    """True if a later attempt at the same request is running: this message is late and must change nothing."""
    return any(key.request_id == other.request_id and key.generation < other.generation for other in living)


@dataclass(frozen=True, slots=True)
class PrefillRequest:
    """First message of decode: compute this prompt; the first `held_blocks` blocks need not be transferred.

    - `resumed_tokens`: trailing tokens that an earlier attempt generated.
    - `lease_ms`: decode's own lease, valid until Accepted names the peer's; 0 if unknown.
    """

    key: RequestKey
    prefill_boot_id: str
    fingerprint: ModelFingerprint
    token_ids: tuple[int, ...]
    sampling: SamplingParams
    cache_salt: bytes = b""
    held_blocks: int = 0
    resumed_tokens: int = 0
    priority: int = 0
    retention: Retention = KEEP
    lease_ms: int = 0


@dataclass(frozen=True, slots=True)
class Accepted:
    """The prompt is admitted. The lease has started and ends after `lease_ms` without a message from decode."""

    boot_id: str
    endpoint: Endpoint
    lease_ms: int


@dataclass(frozen=True, slots=True)
class ReadyBlocks:
    """Final blocks of a layer group, from prompt position `first_index` on, in the prefill worker's pool."""

    first_index: int
    blocks: tuple[int, ...]
    checksums: tuple[int, ...] = ()
    group: int = 0


@dataclass(frozen=True, slots=True)
class PromptFinished:
    """The prompt is computed: first token and counts."""

    first_token_id: int
    logprobs: PositionLogprobs | None
    cached_tokens: int
    store_tokens: int
    queue_ms: int
    compute_ms: int


@dataclass(frozen=True, slots=True)
class LeaseClosed:
    """Last message of prefill: whether every block stayed in place for the whole lease."""

    lease_held: bool


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """The prefill worker is alive, and its engine's thread advances."""


PrefillEvent = Accepted | ReadyBlocks | PromptFinished | LeaseClosed | Heartbeat
