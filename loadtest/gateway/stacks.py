"""What is measured, each before something that costs next to nothing: Weft's gateway, and other people's routers."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Set
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from loadtest.gateway.processes import Processes, answers, free_port

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "models" / "weft-nano"
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
    """Something that answers at `port`; `measured` is what its CPU is counted of, `beside` what works with it by name,
    `client_cores` where clients are to stay; none: anywhere."""

    port: int
    model: str
    measured: list[psutil.Process] = field(default_factory=list)
    scheduler: str = ""
    beside: dict[str, list[psutil.Process]] = field(default_factory=dict)
    client_cores: Set[int] = frozenset()


Starter = Callable[[Processes, float], Stack]


def weft(num_gateways: int = 1, gateway_cores: Set[int] = frozenset(), other_cores: Set[int] = frozenset()) -> Starter:
    """A real scheduler, gateways that share their ports, and the source in place of a worker."""

    def start(processes: Processes, steps_per_second: float) -> Stack:
        scheduler, port, grpc_port = f"127.0.0.1:{free_port()}", free_port(), free_port()
        quiet = {"WEFT_LOG_LEVEL": "WARNING", "GRPC_VERBOSITY": "ERROR"}
        own = {"WEFT_PORT": scheduler.rpartition(":")[2]}
        placing = processes.start([sys.executable, "-m", "weft_services.scheduler"], quiet | own, other_cores)
        source = [sys.executable, "-m", "loadtest.gateway.source", "--scheduler", scheduler, "--name", MODEL.name]
        source += ["--model", str(MODEL), "--steps-per-second", str(steps_per_second)]
        working = processes.start(source, cores=other_cores)
        stack = Stack(port, MODEL.name, scheduler=scheduler, client_cores=other_cores)
        stack.beside = {"scheduler": [placing], "worker": [working]}
        ready = []
        for _ in range(num_gateways):
            private = free_port()
            own = {
                "WEFT_MODEL": str(MODEL),
                "WEFT_SCHEDULER_ADDR": scheduler,
                "WEFT_HTTP_PORT": str(port),
                "WEFT_GRPC_PORT": str(grpc_port),
                "WEFT_SHARE_PORTS": "1",
                "WEFT_PRIVATE_PORT": str(private),
                "WEFT_MAX_REQUESTS": "20000",
            }
            command = [sys.executable, "-m", "weft_services.gateway"]
            stack.measured.append(processes.start(command, quiet | own, gateway_cores))
            ready.append(answers(private, "/ready"))
        processes.wait("weft", lambda: all(is_ready() for is_ready in ready))
        return stack

    return start


def bare(processes: Processes, steps_per_second: float) -> Stack:
    """The mock server that stands behind other people's routers, asked without any of them."""
    port = free_port()
    command = [sys.executable, "-m", "loadtest.gateway.backend", "--port", str(port)]
    backend = processes.start([*command, "--steps-per-second", str(steps_per_second)])
    processes.wait("backend", answers(port, "/health"))
    return Stack(port, "mock", [backend])


def router(command: Callable[[int, int], list[str]], ready: str) -> Starter:
    """One that a command starts, given its port and the backend's."""

    def start(processes: Processes, steps_per_second: float) -> Stack:
        backend, port = bare(processes, steps_per_second).port, free_port()
        process = processes.start(command(port, backend))
        processes.wait(command(port, backend)[0], answers(port, ready))
        return Stack(port, "mock", [process])

    return start


def nginx(binary: str) -> Starter:
    """A plain proxy: the floor."""

    def command(port: int, backend: int) -> list[str]:
        folder = Path(tempfile.mkdtemp(prefix="weft-nginx-"))
        (folder / "nginx.conf").write_text(NGINX_CONF.format(folder=folder, port=port, backend=backend))
        return [binary, "-p", str(folder), "-e", str(folder / "error.log"), "-c", str(folder / "nginx.conf")]

    return router(command, "/v1/models")


def sglang(python: str) -> Starter:
    """sglang-router, with the policy that looks at prefixes."""

    def command(port: int, backend: int) -> list[str]:
        where = ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port())]
        return [python, "-m", "sglang_router.launch_router", *_worker(backend), *where]

    return router(command, "/health")


def vllm(python: str) -> Starter:
    """vllm-router, likewise."""

    def command(port: int, backend: int) -> list[str]:
        where = ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port())]
        return [str(Path(python).with_name("vllm-router")), *_worker(backend), *where]

    return router(command, "/health")


def _worker(backend: int) -> list[str]:
    return ["--worker-urls", f"http://127.0.0.1:{backend}", "--policy", "cache_aware", "--log-level", "error"]


def litellm(python: str) -> Starter:
    """LiteLLM's proxy, one worker process."""

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
    """Those that are here, as `peers.sh` made them; the others have None. nginx is a program of the system."""
    found: dict[str, Starter | None] = {}
    for name, make in PEERS.items():
        program = shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin") if name == "nginx" else None
        if folder is not None and name != "nginx":
            program = str(folder / name / "bin" / "python")
        found[name] = make(program) if program and Path(program).exists() else None
    return found
