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
    no longer than `max_queue_wait_seconds`; `slo` is what waiting and generating may take before new requests have to
    wait, empty: the default of targets.py; `role_balancer` what they may take before a worker changes its role, empty:
    never."""

    host: str = "127.0.0.1"
    port: int = 0
    metrics_port: int = 0
    redis_url: str = ""
    kvstore_addr: str = ""
    report_interval_ms: int = 1000
    max_queue: int = 1024
    max_queue_wait_seconds: float = 2.0
    slo: str = ""
    role_balancer: str = ""

    def __post_init__(self) -> None:
        if not 50 <= self.report_interval_ms <= 10_000:
            raise ConfigError(f"WEFT_REPORT_INTERVAL_MS={self.report_interval_ms}: expected 50 to 10000")
        if self.max_queue < 0:
            raise ConfigError(f"WEFT_MAX_QUEUE={self.max_queue}: expected at least 0")
        if not 0 <= self.max_queue_wait_seconds <= MAX_QUEUE_SECONDS:
            raise ConfigError(
                f"WEFT_MAX_QUEUE_WAIT_SECONDS={self.max_queue_wait_seconds}: expected 0 to {MAX_QUEUE_SECONDS:g}"
            )
        parse_targets(self.slo)
        parse_limits(self.role_balancer)

    @property
    def role_balancer_limits(self) -> BalancerLimits | None:
        """None: nobody's role is planned."""
        return parse_limits(self.role_balancer)

    @property
    def silence_seconds(self) -> float:
        """How long a worker may stay silent."""
        return MAX_MISSED_REPORTS * self.report_interval_ms / 1000
