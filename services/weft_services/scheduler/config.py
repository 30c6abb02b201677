"""The scheduler's settings."""

from __future__ import annotations

from dataclasses import dataclass

from weft.config import ConfigError
from weft_services.scheduler.role_balancer import BalancerLimits, parse_limits
from weft_services.scheduler.slo import parse_targets

# reports missed before a worker counts as gone
MAX_MISSED_REPORTS = 5
# gateways give a Route call five seconds
MAX_QUEUE_SECONDS = 4.0


@dataclass(frozen=True, slots=True)
class Config:
    """From WEFT_* variables. An empty redis_url means no session affinity, an empty kvstore_addr that only
    what this scheduler dispatched is known of who caches what; `max_queue` requests of a model wait for room, each
    no longer than `queue_seconds`; `targets` is what waiting and generating may take before new requests have to
    wait, empty: the default of targets.py; `planner` what they may take before a worker changes its role, empty:
    never."""

    host: str = "127.0.0.1"
    port: int = 0
    metrics_port: int = 0
    redis_url: str = ""
    kvstore_addr: str = ""
    affinity_ttl_seconds: int = 3600
    report_interval_ms: int = 1000
    max_queue: int = 1024
    queue_seconds: float = 2.0
    targets: str = ""
    planner: str = ""
    planner_least: int = 1
    planner_pause_seconds: float = 30.0
    prefix_keys: int = 1_000_000

    def __post_init__(self) -> None:
        if self.affinity_ttl_seconds < 1:
            raise ConfigError(f"WEFT_AFFINITY_TTL_SECONDS={self.affinity_ttl_seconds}: expected at least 1")
        if not 50 <= self.report_interval_ms <= 10_000:
            raise ConfigError(f"WEFT_REPORT_INTERVAL_MS={self.report_interval_ms}: expected 50 to 10000")
        if self.max_queue < 0:
            raise ConfigError(f"WEFT_MAX_QUEUE={self.max_queue}: expected at least 0")
        if not 0 <= self.queue_seconds <= MAX_QUEUE_SECONDS:
            raise ConfigError(f"WEFT_QUEUE_SECONDS={self.queue_seconds}: expected 0 to {MAX_QUEUE_SECONDS:g}")
        if self.prefix_keys < 1:
            raise ConfigError(f"WEFT_PREFIX_KEYS={self.prefix_keys}: expected at least 1")
        parse_targets(self.targets)
        parse_limits(self.planner, self.planner_least, self.planner_pause_seconds)

    @property
    def planner_limits(self) -> BalancerLimits | None:
        """None: nobody's role is planned."""
        return parse_limits(self.planner, self.planner_least, self.planner_pause_seconds)

    @property
    def silence_seconds(self) -> float:
        """How long a worker may stay silent."""
        return MAX_MISSED_REPORTS * self.report_interval_ms / 1000
