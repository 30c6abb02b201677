"""What prefill and decode say to one another during a hand-off, as values; `weft.rpc.handoff` puts them on the wire."""

from __future__ import annotations

from dataclasses import dataclass

from weft.kv.transport import Endpoint
from weft.request import ModelFingerprint, PositionLogprobs, RequestKey, SamplingParams


@dataclass(frozen=True, slots=True)
class PrefillOrder:
    """Decode's first word: compute this prompt; the first `held_blocks` blocks need not be lent."""

    key: RequestKey
    prefill_boot_id: str
    fingerprint: ModelFingerprint
    token_ids: tuple[int, ...]
    sampling: SamplingParams
    cache_salt: bytes = b""
    held_blocks: int = 0


@dataclass(frozen=True, slots=True)
class Accepted:
    """The prompt is admitted; the lease has begun and ends after `lease_ms` of decode's silence."""

    boot_id: str
    endpoint: Endpoint
    lease_ms: int


@dataclass(frozen=True, slots=True)
class ReadyBlocks:
    """Final bytes at prompt positions `first_index`..., in these blocks of the lender's pool."""

    first_index: int
    blocks: tuple[int, ...]
    checksums: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class PromptFinished:
    """The prompt is computed; everything small that decode needs to go on."""

    first_token_id: int
    logprobs: PositionLogprobs | None
    cached_tokens: int
    store_tokens: int
    queue_ms: int
    compute_ms: int


@dataclass(frozen=True, slots=True)
class LeaseClosed:
    """The lender's last word: did every block stay where it was for the whole lease."""

    lease_held: bool


PrefillEvent = Accepted | ReadyBlocks | PromptFinished | LeaseClosed
