"""Values that describe one request during routing: where its prefix is cached, and where it goes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from weft.fleet_types import RouteQuery
from weft_services.scheduler.fleet_state import Worker
from weft_services.scheduler.throughput import DEFAULT_STORE_CREDIT, StoreCredit


@dataclass(frozen=True, slots=True)
class SessionAffinity:
    """Where a session's cache was last: worker ids with their boot ids, and its number of tokens. Unknown: "".

    `is_foreign`: another scheduler process wrote it, or an earlier start of this one.
    """

    prefill_id: str = ""
    decode_id: str = ""
    num_tokens: int = 0
    prefill_boot: str = ""
    decode_boot: str = ""
    is_foreign: bool = False


NO_AFFINITY = SessionAffinity()


@dataclass(frozen=True, slots=True)
class PrefixLocations:
    """Where the prefix of a prompt is cached, in tokens.

    `held`: by worker. `stored_tokens`: in the shared store, the last `disk_tokens` of them on disk only.
    `common_tokens`: the part that more than FEW_HOLDERS workers hold, such as a system prompt; another copy of it pays
    off. `credit`: what a token in the store saves.
    """

    held: Mapping[Worker, int] = field(default_factory=dict)
    stored_tokens: int = 0
    disk_tokens: int = 0
    common_tokens: int = 0
    credit: StoreCredit = DEFAULT_STORE_CREDIT


@dataclass(frozen=True, slots=True)
class RoutingInput:
    """A request with all that is known about it: cached prefixes, affinity, and the expected answer length."""

    query: RouteQuery
    prefixes: PrefixLocations = field(default_factory=PrefixLocations)
    affinity: SessionAffinity = NO_AFFINITY
    output_tokens: int = 0


@dataclass(frozen=True, slots=True)
class PlacementDecision:
    """Where a request goes, and the tokens to reserve. `prefill` None: the decode worker computes the prompt.

    `prefill_tokens` counts only tokens that must be computed. `ttft_seconds` and `itl_seconds` are predictions.
    """

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
        """Predicted time to compute the prompt."""
        return self.prefill_tokens * (self.prefill or self.decode).token_seconds


@dataclass(frozen=True, slots=True)
class PrefixHolder:
    """A worker with the first `num_blocks` blocks of a prompt in its pool."""

    worker_id: str
    boot_id: str
    num_blocks: int


@dataclass(frozen=True, slots=True)
class LocatedPrefix:
    """What kvstore knows about a prompt: the workers that hold leading blocks, and how many the store holds.

    The first `num_in_memory` of the `num_stored` blocks need no disk.
    """

    workers: tuple[PrefixHolder, ...] = ()
    num_stored: int = 0
    num_in_memory: int = 0
