"""Options of a mesh on one machine, the cores and GPUs of each worker, and the address of each process."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from weft.capacity.host_limits import granted_cores
from weft.cli.gpus import gpu_settings
from weft.cli.ports import LOOPBACK, PortTaken, check_listen_address, check_port, free_ports


@dataclass(frozen=True, slots=True)
class MeshOptions:
    """Options of `weft up`. `models`: checkpoint directories by served name; worker counts are per model.

    `threads` 0 shares the cores among the workers. `has_store` is false without Mooncake.
    """

    models: Mapping[str, Path]
    host: str = LOOPBACK
    port: int = 8000
    grpc_port: int = 9000
    num_prefill: int = 1
    num_decode: int = 1
    num_both: int = 0
    num_gateways: int = 1
    dtype: str = "auto"
    weight_format: str = "plain"
    transport: str = "auto"
    threads: int = 0
    max_seqs: int = 0
    keys: str = ""
    allow_unauthenticated: bool = False
    cors_origins: str = ""
    has_tls: bool = False
    disk: Path | None = None
    disk_gib: int = 8
    weights_from: str = ""
    weights_listen: str = ""
    log_level: str = "info"
    has_store: bool = True
    gpus: tuple[str, ...] = ()

    @property
    def worker_threads(self) -> int:
        """torch threads of one worker. All workers together use no more threads than usable cores."""
        num_cores = len(usable_cores())
        return self.threads or max(1, min(num_cores, granted_cores() or num_cores) // self.num_workers)

    @property
    def num_workers(self) -> int:
        """Number of workers of all roles and models."""
        return (self.num_prefill + self.num_decode + self.num_both) * len(self.models)

    @property
    def roles(self) -> dict[str, int]:
        """Number of workers per model, by the prefix of their names."""
        counts = {"prefill": self.num_prefill, "decode": self.num_decode, "worker": self.num_both}
        return {name: count for name, count in counts.items() if count}

    @property
    def gateways(self) -> list[str]:
        """Names of the gateway processes."""
        return ["gateway"] if self.num_gateways == 1 else [f"gateway-{number}" for number in range(self.num_gateways)]

    @property
    def workers(self) -> dict[str, str]:
        """The model of each worker, by worker name; numbers run over all models."""
        return {
            f"{role}-{number}": model
            for role, count in self.roles.items()
            for number, model in enumerate(model for model in self.models for _ in range(count))
        }

    def worker_cpus(self, index: int) -> str:
        """Return WEFT_CPUS for one worker; empty unless there are two cores for each.

        On a single core, compute threads and the event loop would delay each other.
        """
        cores = usable_cores()
        size = len(cores) // self.num_workers
        if size < max(2, self.threads):
            return ""
        return ",".join(map(str, cores[index * size : (index + 1) * size]))

    def worker_share(self, index: int) -> dict[str, str]:
        """Return the settings that give one worker its cores and its GPU."""
        return {"WEFT_CPUS": self.worker_cpus(index), **gpu_settings(self.gpus, self.num_workers, index)}


@dataclass(frozen=True, slots=True)
class Addresses:
    """host:port of each process of a mesh on this machine, chosen before any starts.

    `gateways`: private port by gateway name.
    """

    valkey: str
    scheduler: str
    kvstore: str
    weights: str
    workers: Mapping[str, str]
    gateways: Mapping[str, int]


def usable_cores() -> list[int]:
    """Cores that this process may use."""
    has_choice = hasattr(os, "sched_getaffinity")
    return sorted(os.sched_getaffinity(0)) if has_choice else list(range(os.cpu_count() or 1))


def pick_addresses(options: MeshOptions) -> Addresses:
    """Choose a port for each part. Raises PortTaken for those that the user chose, also when two of them are one."""
    chosen = {options.port: "--port"}
    _choose(chosen, options.grpc_port, "--grpc-port")
    check_port(options.host, options.port, "--port")
    check_port(options.host, options.grpc_port, "--grpc-port")
    lender = ""
    if options.weights_listen:
        lender = check_listen_address(options.weights_listen, "--weights-listen")
        _choose(chosen, int(lender.rpartition(":")[2]), "--weights-listen")
    names, gateways = options.workers, options.gateways
    ports = free_ports(4 + len(names) + len(gateways), chosen)
    valkey, scheduler, kvstore, weights = (f"{LOOPBACK}:{port}" for port in ports[:4])
    weights = lender or weights
    workers = {name: f"{LOOPBACK}:{port}" for name, port in zip(names, ports[4 : 4 + len(names)], strict=True)}
    private = dict(zip(gateways, ports[4 + len(names) :], strict=True))
    return Addresses(valkey, scheduler, kvstore, weights, workers, private)


def _choose(chosen: dict[int, str], port: int, flag: str) -> None:
    """Raises PortTaken where another flag has chosen the same."""
    if (other := chosen.setdefault(port, flag)) != flag:
        raise PortTaken(f"{other} and {flag} are both {port}; choose another with {flag}")
