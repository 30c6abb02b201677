"""The settings of the kvstore process."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from weft.config import WILDCARD_HOSTS, ConfigError
from weft_services.kvstore.memory_index import IndexLimits

MIN_DISK_BYTES = 64 * 1024 * 1024
MIN_SEGMENT_BYTES = 16 * 1024 * 1024  # Mooncake's allocation unit


@dataclass(frozen=True, slots=True)
class KvStoreConfig:
    """Settings of the kvstore; port 0 means any free port.

    `advertise_host`: the address workers use, `host` if empty. Empty `disk_path`: no disk tier. `cache_ttl_seconds` 0:
    blocks do not expire. `tenant_share`: largest share of memory, and of the disk, that one tenant may fill.
    """

    host: str = "127.0.0.1"
    port: int = 0
    advertise_host: str = ""
    metrics_port: int = 0
    master_port: int = 0
    store_memory_bytes: int = 256 * 1024 * 1024
    disk_path: Path | None = None
    disk_bytes: int = 8 * 1024 * 1024 * 1024
    cache_ttl_seconds: float = 0.0
    tenant_share: float = 1.0

    def __post_init__(self) -> None:
        if self.host in WILDCARD_HOSTS and not self.advertise_host:
            raise ConfigError(f"WEFT_ADVERTISE_HOST must be set with WEFT_HOST={self.host}: workers need one address")
        if self.store_memory_bytes < MIN_SEGMENT_BYTES:
            raise ConfigError(
                f"WEFT_STORE_MEMORY_BYTES={self.store_memory_bytes}: expected at least {MIN_SEGMENT_BYTES}"
            )
        if self.disk_bytes < MIN_DISK_BYTES:
            raise ConfigError(f"WEFT_DISK_BYTES={self.disk_bytes}: expected at least {MIN_DISK_BYTES}")
        if self.cache_ttl_seconds < 0:
            raise ConfigError(f"WEFT_CACHE_TTL_SECONDS={self.cache_ttl_seconds:g}: expected 0 or more")
        if not 0 < self.tenant_share <= 1:
            raise ConfigError(f"WEFT_TENANT_SHARE={self.tenant_share}: expected above 0 and at most 1")

    @property
    def index_limits(self) -> IndexLimits:
        """Limits of the memory index."""
        tenant_bytes = int(self.tenant_share * self.store_memory_bytes) if self.tenant_share < 1 else 0
        return IndexLimits(
            ttl_seconds=self.cache_ttl_seconds, tenant_bytes=tenant_bytes, max_bytes=self.store_memory_bytes
        )

    @property
    def store_host(self) -> str:
        """Host of the master and of the segment."""
        return self.advertise_host or self.host
