"""The scheduler's settings."""

from __future__ import annotations

from dataclasses import dataclass

from weft.config import ConfigError
from weft_services.scheduler.role_balancer import BalancerLimits, parse_limits
from weft_services.scheduler.slo import parse_targets

# reports that a worker may miss before it counts as gone
MAX_MISSED_REPORTS = 5
# gateways give up a Route call after 5 s
MAX_QUEUE_SECONDS = 4.0


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Settings from WEFT_* variables.

    Empty `redis_url`: no session affinity. Empty `kvstore_addr`: the prefix index knows only what this scheduler
    placed. Empty `role_balancer`: roles do not change by themselves.
    - `max_queue`: requests of one model that may wait for room, each for at most `max_queue_wait_seconds`
    - `slo`: targets of waiting and generating before new requests must wait; empty: the default of slo.py
    - `role_balancer`: the limits at which workers change their role
    """

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
        """Limits of the role balancer; None: it does not run."""
        return parse_limits(self.role_balancer)

    @property
    def silence_seconds(self) -> float:
        """Seconds without a report after which a worker counts as gone."""
        return MAX_MISSED_REPORTS * self.report_interval_ms / 1000
