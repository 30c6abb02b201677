"""The scheduler's settings."""

from __future__ import annotations

from dataclasses import dataclass

from weft.config import ConfigError

# reports missed before a worker counts as gone
MAX_MISSED_REPORTS = 5


@dataclass(frozen=True, slots=True)
class Config:
    """From WEFT_* variables. An empty redis_url means no session affinity."""

    host: str = "127.0.0.1"
    port: int = 0
    metrics_port: int = 0
    redis_url: str = ""
    affinity_ttl_seconds: int = 3600
    report_interval_ms: int = 1000

    def __post_init__(self) -> None:
        if self.redis_url and not self.redis_url.startswith(("redis://", "rediss://", "unix://")):
            raise ConfigError(f"WEFT_REDIS_URL={self.redis_url!r}: expected redis://host:port/0")
        if self.affinity_ttl_seconds < 1:
            raise ConfigError(f"WEFT_AFFINITY_TTL_SECONDS={self.affinity_ttl_seconds}: expected at least 1")
        if not 50 <= self.report_interval_ms <= 10_000:
            raise ConfigError(f"WEFT_REPORT_INTERVAL_MS={self.report_interval_ms}: expected 50 to 10000")

    @property
    def silence_seconds(self) -> float:
        """How long a worker may stay silent."""
        return MAX_MISSED_REPORTS * self.report_interval_ms / 1000
