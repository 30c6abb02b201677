"""What the processes of a mesh use on this machine: ports, GPUs, cores; and the options and addresses of a mesh.

Imports no torch: nvidia-smi lists the GPUs.
"""

from __future__ import annotations

import errno
import itertools
import os
import random
import socket
import subprocess
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from weft.capacity.host_limits import granted_cores
from weft.options import MAX_PORT

LOOPBACK = "127.0.0.1"
# below the range that the kernel hands out to connections, so that a restarted child finds its port free;
# above the one that Mooncake picks from
INTERNAL_PORTS = range(18_000, 32_000)


class PortTaken(Exception):
    """A port that the user asked for is in use."""


def check_port(host: str, port: int, flag: str, host_flag: str = "--host") -> None:
    """Raise PortTaken, naming the flag to change, unless the port can be bound."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen()
        except OSError as error:
            reason = error.strerror or str(error)
            if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
                flag = host_flag  # the host is unknown or not of this machine: no other port would help
            raise PortTaken(f"cannot listen on {host}:{port} ({reason}); choose another with {flag}") from error


def free_ports(count: int, spoken_for: Collection[int] = ()) -> list[int]:
    """Return `count` free loopback ports from INTERNAL_PORTS, none of them in `spoken_for`."""
    held: list[socket.socket] = []
    try:
        for port in random.sample(INTERNAL_PORTS, len(INTERNAL_PORTS)):
            if len(held) == count:
                break
            if port in spoken_for:
                continue
            probe = socket.socket()
            held.append(probe)
            try:
                probe.bind((LOOPBACK, port))
            except OSError:
                held.pop().close()
        return [probe.getsockname()[1] for probe in held]
    finally:
        for probe in held:
            probe.close()


def check_listen_address(listen: str, flag: str) -> str:
    """Return the address that reaches a listener at HOST:PORT from this machine. Raises PortTaken."""
    host, _, port = listen.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) <= MAX_PORT:
        raise PortTaken(f"{flag} {listen}: expected HOST:PORT with a port of 1 to {MAX_PORT}")
    bare = bare_host(host)
    check_port(bare, int(port), flag, host_flag=flag)
    return f"{reachable(bare)}:{port}"


def bare_host(host: str) -> str:
    """Remove the brackets of an IPv6 address."""
    return host.removeprefix("[").removesuffix("]")


def reachable(host: str) -> str:
    """The address to call on this machine for a listener bound to host."""
    if host in ("0.0.0.0", ""):
        return LOOPBACK
    if host == "::":
        return "[::1]"
    return f"[{host}]" if ":" in host else host


ASK_SECONDS = 60.0
# CUDA's variable for the devices that a process may use
VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True, slots=True)
class Card:
    """A GPU as nvidia-smi reports it; 0 bytes: not reported."""

    name: str
    total_bytes: int
    free_bytes: int
    driver: str


def cards() -> list[Card]:
    """Return the NVIDIA GPUs of this machine; none if nvidia-smi fails."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total,memory.free,driver_version", "--format=csv,noheader,nounits"]
    try:
        ended = subprocess.run(query, capture_output=True, text=True, timeout=ASK_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    rows = [line.split(", ") for line in ended.stdout.splitlines()] if ended.returncode == 0 else []
    return [Card(row[0], _mebibytes(row[1]), _mebibytes(row[2]), row[3]) for row in rows if len(row) == 4]


def _mebibytes(text: str) -> int:
    """Return bytes. nvidia-smi prints no number where GPU and processor share their memory."""
    return int(text) << 20 if text.isdecimal() else 0


def all_report_memory(found: Sequence[Card]) -> bool:
    """Return whether nvidia-smi reports the memory of each GPU."""
    return bool(found) and all(card.total_bytes for card in found)


def usable_gpus(environ: Mapping[str, str], found: Sequence[Card] | None = None) -> tuple[str, ...]:
    """Return CUDA's names of the usable GPUs: those of CUDA_VISIBLE_DEVICES up to the first invalid one, else all.

    `found` saves a call of nvidia-smi.
    """
    if VISIBLE in environ:
        chosen = filter(None, (name.strip() for name in environ[VISIBLE].split(",")))
        return tuple(itertools.takewhile(lambda name: not name.startswith("-"), chosen))
    return tuple(str(number) for number in range(len(cards() if found is None else found)))


def chosen_cards(found: Sequence[Card], gpus: Sequence[str]) -> list[Card]:
    """Return the GPUs with these names; all if a name is no valid number."""
    numbers = [int(name) for name in gpus if name.isdecimal() and int(name) < len(found)]
    return [found[number] for number in numbers] if len(numbers) == len(gpus) else list(found)


def gpu_settings(gpus: Sequence[str], num_workers: int, index: int) -> dict[str, str]:
    """Return the settings of one worker: its GPU, round-robin, and its share of a GPU with several workers."""
    if not gpus:
        return {}
    turn = index % len(gpus)
    num_sharing = len(range(turn, num_workers, len(gpus)))
    return {VISIBLE: gpus[turn], "WEFT_GPU_SHARE": f"{1 / num_sharing:.4f}"}


@dataclass(frozen=True, slots=True)
class MeshOptions:
    """Options of `weft up`. `models`: checkpoint directories by served name; worker counts are per model.

    `threads` 0 shares the cores among the workers. `tp`, `ep`: processes that compute each worker's model together.
    `has_store` is false without Mooncake.
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
    draft: str = "auto"
    draft_layers: str = ""
    draft_tokens: int = 0
    tp: int = 1
    ep: int = 1
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
