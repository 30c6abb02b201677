"""Weft's gateway and other routers, each in front of a backend without a model."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from loadtest.processes import Processes, answers
from weft.cli.layout import free_ports

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "models" / "weft-nano"
# sequences in a step of the fake worker without a pace: as many as there are clients
AT_ONCE = 32
NGINX_CONF = """
worker_processes 1;
pid {folder}/nginx.pid;
error_log {folder}/error.log;
daemon off;
events {{ worker_connections 20000; }}
http {{
  access_log off;
  client_body_temp_path {folder}; proxy_temp_path {folder};
  fastcgi_temp_path {folder}; uwsgi_temp_path {folder}; scgi_temp_path {folder};
  keepalive_requests 1000000;
  upstream worker {{ server 127.0.0.1:{backend}; keepalive 256; keepalive_requests 1000000; }}
  server {{
    listen 127.0.0.1:{port};
    location / {{
      proxy_pass http://worker; proxy_http_version 1.1; proxy_set_header Connection ""; proxy_buffering off;
    }}
  }}
}}
"""
LITELLM_CONF = """
model_list:
  - model_name: mock
    litellm_params: {{model: openai/mock, api_base: "http://127.0.0.1:{backend}/v1", api_key: none}}
general_settings: {{dangerously_permit_weak_or_unset_master_key: true}}
"""


@dataclass(slots=True)
class Stack:
    """A router that answers at `port`.

    The CPU of `measured` counts; `beside` has the other processes by name. Clients keep to `client_cores`, if any.
    `private_ports` serve the metrics of each of Weft's gateways, `source_port` those of the worker without a model.
    """

    port: int
    model: str
    measured: list[psutil.Process] = field(default_factory=list)
    scheduler: str = ""
    beside: dict[str, list[psutil.Process]] = field(default_factory=dict)
    client_cores: Set[int] = frozenset()
    private_ports: Sequence[int] = ()
    source_port: int = 0
    grpc_port: int = 0


Starter = Callable[[Processes, float], Stack]


def weft(num_gateways: int = 1, gateway_cores: Sequence[int] = (), other_cores: Set[int] = frozenset()) -> Starter:
    """Return a starter of a scheduler, gateways that share their ports, each on one of the cores, and a fake worker."""

    def start(processes: Processes, steps_per_second: float) -> Stack:
        scheduler_port, port, grpc_port, source_port, *private_ports = free_ports(4 + num_gateways)
        scheduler = f"127.0.0.1:{scheduler_port}"
        quiet = {"WEFT_LOG_LEVEL": "WARNING", "GRPC_VERBOSITY": "ERROR"}
        # no SLO: bursts of 128 requests measure the gateway, not admission
        own = {"WEFT_PORT": str(scheduler_port), "WEFT_SLO": "0/0"}
        placing = processes.start([sys.executable, "-m", "weft_services.scheduler"], quiet | own, other_cores)
        source = [sys.executable, "-m", "loadtest.gateway.fake_worker", "--scheduler", scheduler, "--name", MODEL.name]
        source += ["--model", str(MODEL), "--steps-per-second", str(steps_per_second)]
        source += ["--metrics-port", str(source_port), *([] if steps_per_second else ["--at-once", str(AT_ONCE)])]
        working = processes.start(source, cores=other_cores)
        stack = Stack(port, MODEL.name, scheduler=scheduler, client_cores=other_cores, source_port=source_port)
        stack.grpc_port = grpc_port
        stack.beside = {"scheduler": [placing], "worker": [working]}
        for place, private in enumerate(private_ports):
            own = {
                "WEFT_MODEL": str(MODEL),
                "WEFT_SCHEDULER_ADDR": scheduler,
                "WEFT_HTTP_PORT": str(port),
                "WEFT_GRPC_PORT": str(grpc_port),
                "WEFT_REUSE_PORT": "1",
                "WEFT_PRIVATE_PORT": str(private),
                "WEFT_MAX_REQUESTS": "20000",
            }
            command = [sys.executable, "-m", "weft_services.gateway"]
            cores = {gateway_cores[place % len(gateway_cores)]} if gateway_cores else frozenset()
            stack.measured.append(processes.start(command, quiet | own, cores))
        stack.private_ports = private_ports
        ready = [answers(private, "/ready") for private in private_ports]
        processes.wait("weft", lambda: all(is_ready() for is_ready in ready))
        return stack

    return start


def bare(processes: Processes, steps_per_second: float) -> Stack:
    """Start the mock server alone."""
    (port,) = free_ports(1)
    command = [sys.executable, "-m", "loadtest.gateway.fake_openai", "--port", str(port)]
    backend = processes.start([*command, "--steps-per-second", str(steps_per_second)])
    processes.wait("backend", answers(port, "/health"))
    return Stack(port, "mock", [backend])


def router(command: Callable[[int, int], list[str]], ready: str) -> Starter:
    """Return a starter for a command that takes the router's port and the backend's."""

    def start(processes: Processes, steps_per_second: float) -> Stack:
        backend, (port,) = bare(processes, steps_per_second).port, free_ports(1)
        process = processes.start(command(port, backend))
        processes.wait(command(port, backend)[0], answers(port, ready))
        return Stack(port, "mock", [process])

    return start


def nginx(binary: str) -> Starter:
    """Return a plain proxy, the lower bound."""

    def command(port: int, backend: int) -> list[str]:
        folder = Path(tempfile.mkdtemp(prefix="weft-nginx-"))
        (folder / "nginx.conf").write_text(NGINX_CONF.format(folder=folder, port=port, backend=backend))
        return [binary, "-p", str(folder), "-e", str(folder / "error.log"), "-c", str(folder / "nginx.conf")]

    return router(command, "/v1/models")


def sglang(python: str) -> Starter:
    """Return sglang-router with its prefix-aware policy."""

    def command(port: int, backend: int) -> list[str]:
        where = ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_ports(1)[0])]
        return [python, "-m", "sglang_router.launch_router", *_worker(backend), *where]

    return router(command, "/health")


def vllm(python: str) -> Starter:
    """Return vllm-router with its prefix-aware policy."""

    def command(port: int, backend: int) -> list[str]:
        where = ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_ports(1)[0])]
        return [str(Path(python).with_name("vllm-router")), *_worker(backend), *where]

    return router(command, "/health")


def _worker(backend: int) -> list[str]:
    return ["--worker-urls", f"http://127.0.0.1:{backend}", "--policy", "cache_aware", "--log-level", "error"]


def litellm(python: str) -> Starter:
    """Return LiteLLM's proxy with one worker process."""

    def command(port: int, backend: int) -> list[str]:
        config = Path(tempfile.mkdtemp(prefix="weft-litellm-")) / "config.yaml"
        config.write_text(LITELLM_CONF.format(backend=backend))
        return [str(Path(python).with_name("litellm")), "--config", str(config), "--port", str(port)]

    return router(command, "/health/liveliness")


PEERS: dict[str, Callable[[str], Starter]] = {
    "nginx": nginx,
    "sglang-router": sglang,
    "vllm-router": vllm,
    "litellm": litellm,
}


def find_peers(folder: Path | None) -> dict[str, Starter | None]:
    """Return starters of the routers that `peers.sh` installed, None for the others. nginx is the system's."""
    found: dict[str, Starter | None] = {}
    for name, make in PEERS.items():
        program = shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin") if name == "nginx" else None
        if folder is not None and name != "nginx":
            program = str(folder / name / "bin" / "python")
        found[name] = make(program) if program and Path(program).exists() else None
    return found
