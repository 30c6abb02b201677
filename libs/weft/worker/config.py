"""The settings of a worker process, prefill or decode; docs/reference/settings.md has the table."""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import StrEnum
from pathlib import Path

from weft.capacity.sizes import RequestedSizes
from weft.config import MAX_THREADS, WILDCARD_HOSTS, ConfigError, CpuKernels
from weft.engine.config import CPU_NICENESS, MAX_NICENESS
from weft.kv.transfer_protocol import LEASE_SECONDS
from weft.request import WorkerRole
from weft.worker.os_tuning import parse_cpus

# Below the minimum, a busy machine is silent for longer; above the maximum, peers wait too long for a lost one.
MIN_LEASE_SECONDS, MAX_LEASE_SECONDS = 1.0, 3600.0


class Dtype(StrEnum):
    """dtype of computation and KV cache; auto is float32 on CPU, bfloat16 on CUDA."""

    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


class DeviceChoice(StrEnum):
    """Device to compute on; auto is the GPU if torch can use one, else the CPU."""

    AUTO = "auto"
    CUDA = "cuda"


class WeightFormat(StrEnum):
    """How matrices stay in memory: as published, or packed losslessly to 12 bits; auto packs on a CPU."""

    AUTO = "auto"
    PLAIN = "plain"
    PACKED12 = "packed12"


class TransportChoice(StrEnum):
    """How KV blocks are pulled; auto tries a local pool's file, then Mooncake, then gRPC."""

    AUTO = "auto"
    MOONCAKE = "mooncake"
    GRPC = "grpc"


class MooncakeProtocol(StrEnum):
    TCP = "tcp"
    RDMA = "rdma"


class StoreFetchPolicy(StrEnum):
    """Which blocks to fetch from the store: those cheaper to fetch than to compute, or all."""

    CHEAPER = "cheaper"
    ALWAYS = "always"


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """Zero means: choose for me (ports, blocks from memory, tokens and sequences of a step, all cores).

    `role`: what a worker that serves both begins with.
    """

    worker_id: str
    scheduler_addr: str
    weights_addr: str
    kvstore_addr: str = ""
    model: Path | None = None
    model_name: str = ""
    host: str = "127.0.0.1"
    port: int = 0
    advertise_host: str = ""
    metrics_port: int = 0
    device: DeviceChoice = DeviceChoice.AUTO
    dtype: Dtype = Dtype.AUTO
    weight_format: WeightFormat = WeightFormat.AUTO
    num_blocks: int = 0
    chunk_tokens: int = 0
    mixed_step_prefill_tokens: int = 0
    max_seqs: int = 0
    gpu_share: float = 1.0
    tune_seconds: float = 0.0
    transport: TransportChoice = TransportChoice.AUTO
    mooncake_protocol: MooncakeProtocol = MooncakeProtocol.TCP
    store_fetch_policy: StoreFetchPolicy = StoreFetchPolicy.CHEAPER
    lease_seconds: float = LEASE_SECONDS
    threads: int = 0
    cpus: str = ""
    niceness: int = CPU_NICENESS
    grace_seconds: float = 30.0
    role: WorkerRole = WorkerRole.BOTH
    cpu_kernels: CpuKernels | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.threads <= MAX_THREADS:
            raise ConfigError(f"WEFT_THREADS={self.threads}: expected 0 to {MAX_THREADS}")
        self._check_seconds()
        _ = self.wanted
        if self.cpus:
            parse_cpus(self.cpus)
        if not 0 <= self.niceness <= MAX_NICENESS:
            raise ConfigError(f"WEFT_NICENESS={self.niceness}: expected 0 to {MAX_NICENESS}")
        if not 0 < self.gpu_share <= 1:
            raise ConfigError(f"WEFT_GPU_SHARE={self.gpu_share:g}: expected above 0 and at most 1")
        if not self.served_name:
            raise ConfigError("WEFT_MODEL_NAME or WEFT_MODEL must be set")
        if self.host in WILDCARD_HOSTS and not self.advertise_host:
            raise ConfigError(f"WEFT_ADVERTISE_HOST must be set with WEFT_HOST={self.host}: peers need one address")

    def _check_seconds(self) -> None:
        if not MIN_LEASE_SECONDS <= self.lease_seconds <= MAX_LEASE_SECONDS:
            limits = f"{MIN_LEASE_SECONDS:g} to {MAX_LEASE_SECONDS:g}"
            raise ConfigError(f"WEFT_LEASE_SECONDS={self.lease_seconds:.7g}: expected {limits}")
        for name in ("grace_seconds", "tune_seconds"):
            if not getattr(self, name) >= 0:  # also rejects NaN
                raise ConfigError(f"WEFT_{name.upper()}={getattr(self, name):g}: expected 0 or more")

    @property
    def wanted(self) -> RequestedSizes:
        """The fields that determine the worker's sizes. Raises ConfigError."""
        return RequestedSizes(**{field.name: getattr(self, field.name) for field in fields(RequestedSizes)})

    @property
    def served_name(self) -> str:
        """The model's name in requests."""
        return self.model_name or (self.model.name if self.model else "")

    @property
    def peer_host(self) -> str:
        """The host under which peers reach this worker."""
        return self.advertise_host or self.host

    def peer_address(self, port: str | int) -> str:
        """Return host:port for peers, with an IPv6 address in brackets."""
        host = self.peer_host
        return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"
