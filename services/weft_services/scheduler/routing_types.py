"""Values that describe one request on its way to a placement, and what the kvstore reports about its prefix."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from weft.fleet_types import RouteQuery
from weft_services.scheduler.fleet_state import Worker
from weft_services.scheduler.throughput import DEFAULT_STORE_CREDIT, StoreCredit


@dataclass(frozen=True, slots=True)
class SessionAffinity:
    """Where a session's cache was last seen: worker ids, "" when unknown, and which starts of them; and how many tokens
    lay there. `is_news`: another scheduler saw it, or this one before it was started."""

    prefill_id: str = ""
    decode_id: str = ""
    num_tokens: int = 0
    prefill_boot: str = ""
    decode_boot: str = ""
    is_foreign: bool = False


NO_AFFINITY = SessionAffinity()


@dataclass(frozen=True, slots=True)
class PrefixLocations:
    """What is known of where a prompt's prefix lies: tokens by worker, and in the store that all share, the last
    `disk_tokens` of those on its disk only. `common_tokens`: the part that more than a few workers hold, such as a
    system prompt. Another copy pays off. `credit`: what a token in the store saves."""

    held: Mapping[Worker, int] = field(default_factory=dict)
    stored_tokens: int = 0
    disk_tokens: int = 0
    common_tokens: int = 0
    credit: StoreCredit = DEFAULT_STORE_CREDIT


@dataclass(frozen=True, slots=True)
class RoutingInput:
    """What a request asks of the fleet: itself, what is cached of it where, and how long its answer will be."""

    query: RouteQuery
    prefixes: PrefixLocations = field(default_factory=PrefixLocations)
    affinity: SessionAffinity = NO_AFFINITY
    output_tokens: int = 0


@dataclass(frozen=True, slots=True)
class PlacementDecision:
    """Where a request goes. `prefill` None: the decode worker computes the prompt. Tokens are what to book:
    `prefill_tokens` only those that have to be computed. `ttft_seconds` and `itl_seconds` are predictions."""

    decode: Worker
    prefill: Worker | None
    prefill_tokens: int
    decode_tokens: int
    follows_session: bool = False
    ttft_seconds: float = 0.0
    wait_seconds: float = 0.0
    itl_seconds: float = 0.0
    cached_tokens: int = 0

    @property
    def compute_seconds(self) -> float:
        """What computing the prompt takes."""
        return self.prefill_tokens * (self.prefill or self.decode).token_seconds


@dataclass(frozen=True, slots=True)
class PrefixHolder:
    """A worker that has the first `num_blocks` blocks of a prompt in its pool."""

    worker_id: str
    boot_id: str
    num_blocks: int


@dataclass(frozen=True, slots=True)
class LocatedPrefix:
    """Who holds leading blocks of a prompt, as kvstore says: workers, and so many of them the store; of these the first
    `num_in_memory` need no disk."""

    workers: tuple[PrefixHolder, ...] = ()
    num_stored: int = 0
    num_in_memory: int = 0
