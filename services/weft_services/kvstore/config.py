"""The settings of the kvstore process."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field, model_validator

from weft.config import Port, Settings, Share
from weft.errors import ConfigError
from weft.options import WILDCARD_HOSTS

MIN_DISK_BYTES = 64 * 1024 * 1024
MIN_SEGMENT_BYTES = 16 * 1024 * 1024  # Mooncake's allocation unit


class KvStoreConfig(Settings):
    """Settings of the kvstore; port 0 means any free port.

    `advertise_host`: the address workers use, `host` if empty. Empty `disk_path`: no disk tier. `cache_ttl_seconds` 0:
    blocks do not expire. `tenant_share`: largest share of memory, and of the disk, that one tenant may fill.
    """

    host: str = "127.0.0.1"
    port: Port = 0
    advertise_host: str = ""
    metrics_port: Port = 0
    store_memory_bytes: Annotated[int, Field(ge=MIN_SEGMENT_BYTES, lt=2**63)] = 256 * 1024 * 1024
    disk_path: Path | None = None
    disk_bytes: Annotated[int, Field(ge=MIN_DISK_BYTES, lt=2**63)] = 8 * 1024 * 1024 * 1024
    cache_ttl_seconds: Annotated[float, Field(ge=0)] = 0.0
    tenant_share: Share = 1.0

    @model_validator(mode="after")
    def _check_host(self) -> KvStoreConfig:
        if self.host in WILDCARD_HOSTS and not self.advertise_host:
            raise ConfigError(f"WEFT_ADVERTISE_HOST must be set with WEFT_HOST={self.host}: workers need one address")
        return self

    @property
    def store_host(self) -> str:
        """Host of the master and of the segment."""
        return self.advertise_host or self.host
