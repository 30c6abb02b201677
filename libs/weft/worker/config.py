"""The settings of a worker process, prefill or decode; docs/reference/settings.md has the table."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Annotated

from pydantic import Field, model_validator

from weft.capacity.sizes import RequestedSizes
from weft.config import Address, Count, Port, Settings, Share, Threads
from weft.errors import ConfigError
from weft.model.sharding import Layout
from weft.options import (
    CPU_NICENESS,
    MAX_DRAFT_TOKENS,
    MAX_NICENESS,
    MAX_RANKS,
    WILDCARD_HOSTS,
    CpuKernels,
    DeviceChoice,
    DraftChoice,
    Dtype,
    StoreFetchPolicy,
    TransportChoice,
    WeightFormat,
    names_draft_head,
    parse_cpus,
)
from weft.request import WorkerRole

# Silence of either side that ends a KV transfer. Below the minimum, a busy machine is silent for longer; above the
# maximum, peers wait too long for a lost one.
LEASE_SECONDS, MIN_LEASE_SECONDS, MAX_LEASE_SECONDS = 10.0, 1.0, 3600.0


class SizeSettings(Settings):
    """The settings that determine a worker's sizes; 0 and auto: the worker chooses."""

    dtype: Dtype = Dtype.AUTO
    weight_format: WeightFormat = WeightFormat.AUTO
    num_blocks: Count = 0
    chunk_tokens: Count = 0
    max_seqs: Count = 0

    @property
    def wanted(self) -> RequestedSizes:
        """These settings, as `choose_sizes` takes them."""
        return RequestedSizes(**{field.name: getattr(self, field.name) for field in fields(RequestedSizes)})


class WorkerConfig(SizeSettings):
    """Zero means that the worker chooses (ports, blocks from memory, tokens and sequences of a step, all cores).

    - `role`: what a worker that serves both begins with.
    - `tp`, `ep`: ranks that compute the model together; see `weft.model.sharding.Layout`.
    - `draft`: see `weft.options.DraftChoice`. The weights service has the files of a draft model.
    """

    worker_id: str
    scheduler_addr: Address
    weights_addr: Address
    kvstore_addr: Address = ""
    model: Path | None = None
    model_name: str = ""
    host: str = "127.0.0.1"
    port: Port = 0
    advertise_host: str = ""
    metrics_port: Port = 0
    device: DeviceChoice = DeviceChoice.AUTO
    gpu_share: Share = 1.0
    transport: TransportChoice = TransportChoice.AUTO
    store_fetch_policy: StoreFetchPolicy = StoreFetchPolicy.CHEAPER
    draft: str = DraftChoice.AUTO
    draft_layers: str = ""
    draft_tokens: Annotated[int, Field(ge=0, le=MAX_DRAFT_TOKENS)] = 0
    lease_seconds: Annotated[float, Field(ge=MIN_LEASE_SECONDS, le=MAX_LEASE_SECONDS)] = LEASE_SECONDS
    threads: Threads = 0
    cpus: str = ""
    niceness: Annotated[int, Field(ge=0, le=MAX_NICENESS)] = CPU_NICENESS
    grace_seconds: Annotated[float, Field(ge=0)] = 30.0
    role: WorkerRole = WorkerRole.BOTH
    tp: Annotated[int, Field(ge=1, le=MAX_RANKS)] = 1
    ep: Annotated[int, Field(ge=1, le=MAX_RANKS)] = 1
    cpu_kernels: CpuKernels | None = None

    @model_validator(mode="after")
    def _check(self) -> WorkerConfig:
        if self.cpus:
            parse_cpus(self.cpus)
        if not self.served_name:
            raise ConfigError("WEFT_MODEL_NAME or WEFT_MODEL must be set")
        if self.tp * self.ep > 1 and (names_draft_head(self.draft) or self.draft == DraftChoice.MTP):
            raise ConfigError(f"WEFT_DRAFT={self.draft}: draft models do not run on several ranks (WEFT_TP); use ngram")
        if self.ep > self.tp:
            raise ConfigError(f"WEFT_EP={self.ep} must not be above WEFT_TP={self.tp}: ranks share the attention")
        if self.host in WILDCARD_HOSTS and not self.advertise_host:
            raise ConfigError(f"WEFT_ADVERTISE_HOST must be set with WEFT_HOST={self.host}: peers need one address")
        return self

    @property
    def served_name(self) -> str:
        """The model's name in requests."""
        return self.model_name or (self.model.name if self.model else "")

    @property
    def layout(self) -> Layout:
        """How the ranks divide the model."""
        return Layout(self.tp, 1, self.ep)

    @property
    def peer_host(self) -> str:
        """The host under which peers reach this worker."""
        return self.advertise_host or self.host

    def peer_address(self, port: str | int) -> str:
        """Return host:port for peers, with an IPv6 address in brackets."""
        host = self.peer_host
        return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"
