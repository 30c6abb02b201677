"""Weft's mesh and its peers: how each server starts with the same checkpoint, and when it answers."""

from __future__ import annotations

import math
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil

from loadtest.engine.cpu_vllm import environment
from loadtest.processes import BenchError, Processes, answers
from weft.cli.layout import free_ports

ROOT = Path(__file__).resolve().parents[2]
# compiling counts in vLLM's first start
START_SECONDS = 600.0
MAX_TOKENS, MAX_SEQUENCES = 2048, 64
MESH = "Weft"


@dataclass(frozen=True, slots=True)
class Contestant:
    """A server by name: its command and environment for a port, and the path that answers 200 once it serves.

    A server without a command runs already, at `url`.
    """

    name: str
    command: Callable[[int], list[str]] | None
    environment: Mapping[str, str] = field(default_factory=dict)
    ready: str = "/health"
    url: str = ""

    def start(self, processes: Processes) -> tuple[str, psutil.Process | None, float]:
        """Start it and wait for an answer; return its address, process and start time. Raises BenchError."""
        if self.command is None:
            return self.url, None, math.nan
        (port,) = free_ports(1)
        began, url = time.perf_counter(), f"http://127.0.0.1:{port}"
        process = processes.start(self.command(port), self.environment)
        processes.wait(self.name, answers(port, self.ready), START_SECONDS)
        model = httpx.get(f"{url}/v1/models", timeout=30).json()["data"][0]["id"]
        body = {"model": model, "prompt": "Hello", "max_tokens": 1}
        first = httpx.post(f"{url}/v1/completions", json=body, timeout=120)
        if first.status_code != httpx.codes.OK:
            raise BenchError(f"{self.name}: HTTP {first.status_code}: {first.text[:300]}")
        return url, process, time.perf_counter() - began


def running(url: str) -> Contestant:
    """Return a server that runs already."""
    return Contestant(url, None, url=url)


def weft(model: Path, dtype: str, workers: Mapping[str, int], name: str) -> Contestant:
    """Return `weft up` with some workers of each role, and as many threads as it chooses itself."""

    def command(port: int) -> list[str]:
        (grpc_port,) = free_ports(1)
        arguments = ["--model", str(model), "--dtype", dtype, "--port", str(port), "--grpc-port", str(grpc_port)]
        roles = [word for role, count in workers.items() for word in (f"--{role}", str(count))]
        return [sys.executable, "-m", "weft.cli.main", "up", *arguments, *roles, "--log-level", "warning"]

    return Contestant(name, command, {}, "/ready")


def vllm(python: Path, model: Path, dtype: str, threads: int) -> Contestant:
    """Return its OpenAI server with the settings of its manual for CPUs."""

    def command(port: int) -> list[str]:
        arguments = ["--model", str(model), "--dtype", dtype, "--host", "127.0.0.1", "--port", str(port)]
        bounds = ["--max-model-len", str(MAX_TOKENS), "--max-num-seqs", str(MAX_SEQUENCES)]
        return [str(python), "-m", "vllm.entrypoints.openai.api_server", *arguments, *bounds]

    return Contestant("vLLM", command, environment(str(python.parent.parent), threads))


def make_gguf(python: Path, model: Path, dtype: str) -> Path:
    """Convert the checkpoint with llama.cpp's environment, unless it is converted already. Raises BenchError."""
    made = subprocess.run(
        [str(python), "-m", "loadtest.engine.gguf_model", str(model), dtype],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=START_SECONDS,
    )
    if made.returncode:
        raise BenchError(f"llama.cpp: no GGUF was made\n{made.stderr[-1000:]}")
    return Path(made.stdout.strip().splitlines()[-1])


def llama(python: Path, model: Path, dtype: str, threads: int) -> Contestant:
    """Return llama.cpp's server, which lies beside `python`, with a slot for each client; converts to GGUF first."""
    path = str(make_gguf(python, model, dtype))

    def command(port: int) -> list[str]:
        arguments = ["--model", path, "--host", "127.0.0.1", "--port", str(port)]
        bounds = ["--threads", str(threads), "--parallel", str(MAX_SEQUENCES), "--kv-unified"]
        return [
            str(python.parent / "llama-server"),
            *arguments,
            *bounds,
            "--ctx-size",
            str(MAX_SEQUENCES * MAX_TOKENS // 4),
        ]

    return Contestant("llama.cpp", command)


def ours(model: Path, dtype: str) -> Iterable[Contestant]:
    """Yield the mesh with one `both` worker, and with a prefill and a decode worker."""
    yield weft(model, dtype, {"both": 1}, MESH)
    yield weft(model, dtype, {"prefill": 1, "decode": 1}, f"{MESH}, prefill and decode apart")
