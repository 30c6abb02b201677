"""The settings of the kvstore process."""

from __future__ import annotations

from dataclasses import dataclass

from weft.config import ConfigError

WILDCARD_HOSTS = ("0.0.0.0", "::")
MIN_SEGMENT_BYTES = 16 * 1024 * 1024  # Mooncake's own unit of allocation


@dataclass(frozen=True, slots=True)
class Config:
    """`advertise_host` is how workers reach this machine, `host` if empty; ports 0 mean any free one."""

    host: str = "127.0.0.1"
    port: int = 0
    advertise_host: str = ""
    metrics_port: int = 0
    master_port: int = 0
    segment_bytes: int = 256 * 1024 * 1024

    def __post_init__(self) -> None:
        if self.host in WILDCARD_HOSTS and not self.advertise_host:
            raise ConfigError(f"WEFT_ADVERTISE_HOST must be set with WEFT_HOST={self.host}: workers need one address")
        if self.segment_bytes < MIN_SEGMENT_BYTES:
            raise ConfigError(f"WEFT_SEGMENT_BYTES={self.segment_bytes}: at least {MIN_SEGMENT_BYTES} are needed")

    @property
    def store_host(self) -> str:
        """The host of the master and of the segment."""
        return self.advertise_host or self.host
