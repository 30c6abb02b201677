"""The scheduler's settings."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field, model_validator

from weft.config import Address, Count, Port, Settings
from weft_services.scheduler.admission import parse_targets
from weft_services.scheduler.role_balancer import BalancerLimits, parse_limits

# reports that a worker may miss before it counts as gone
MAX_MISSED_REPORTS = 5
# gateways give up a Route call after 5 s
MAX_QUEUE_SECONDS = 4.0


class SchedulerConfig(Settings):
    """Settings from WEFT_* variables.

    Empty `redis_url`: no session affinity. Empty `kvstore_addr`: the prefix index knows only what this scheduler
    placed. Empty `role_balancer`: roles do not change by themselves.
    - `max_queue`: requests of one model that may wait for room, each for at most `max_queue_wait_seconds`
    - `report_interval_ms`: how often workers report; not a setting
    - `slo`: targets of waiting and generating before new requests must wait; empty: the default of admission.py
    - `role_balancer`: the limits at which workers change their role
    """

    host: str = "127.0.0.1"
    port: Port = 0
    metrics_port: Port = 0
    redis_url: str = ""
    kvstore_addr: Address = ""
    report_interval_ms: ClassVar[int] = 1000
    max_queue: Count = 1024
    max_queue_wait_seconds: Annotated[float, Field(ge=0, le=MAX_QUEUE_SECONDS)] = 2.0
    slo: str = ""
    role_balancer: str = ""

    @model_validator(mode="after")
    def _check_targets(self) -> SchedulerConfig:
        parse_targets(self.slo)
        parse_limits(self.role_balancer)
        return self

    @property
    def role_balancer_limits(self) -> BalancerLimits | None:
        """Limits of the role balancer; None: it does not run."""
        return parse_limits(self.role_balancer)

    @property
    def silence_seconds(self) -> float:
        """Seconds without a report after which a worker counts as gone."""
        return MAX_MISSED_REPORTS * self.report_interval_ms / 1000
