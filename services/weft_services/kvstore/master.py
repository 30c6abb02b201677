"""Runs the Mooncake master, which knows the segment of every object, as a child process.

The wheel ships its program.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

from weft.kv.store_client_proxy import StoreLost

START_SECONDS = 10.0
POLL_SECONDS = 0.02
LEASE_MS = 500
PROGRAM = "mooncake_master"
HOW_TO_INSTALL = "install it with: pip install 'weft[mooncake-cpu]' (or mooncake-cuda12, mooncake-cuda13)"


class Master:
    """A running master; clients reach it at `address`."""

    def __init__(self, process: subprocess.Popen[bytes], address: str) -> None:
        self.address = address
        self._process = process

    @classmethod
    async def start(cls, bind_host: str, host: str) -> Master:
        """Start a master and wait until it listens on a free port. Raises StoreLost."""
        program = _find_program()
        try:
            port = _free_port(bind_host)
            process = _spawn(program, bind_host, port)
        except OSError as error:  # out of descriptors or processes, which may pass
            raise StoreLost(f"{PROGRAM} cannot be started: {error}") from error
        master = cls(process, f"{host}:{port}")
        try:
            await _until_listening(process, "127.0.0.1" if bind_host == "0.0.0.0" else bind_host, port)
        except BaseException:
            await master.stop()
            raise
        return master

    @property
    def is_running(self) -> bool:
        """True until the process has ended."""
        return self._process.poll() is None

    async def stop(self) -> None:
        """Kill the process; it has no state worth saving."""
        self._process.kill()
        await asyncio.to_thread(self._process.wait)


def _find_program() -> str:
    beside_python = str(Path(sys.executable).parent)
    path = os.pathsep.join([beside_python, os.environ.get("PATH", os.defpath)])
    program = shutil.which(PROGRAM, path=path)
    if program is None:
        raise StoreLost(f"{PROGRAM} is not installed; {HOW_TO_INSTALL}")
    return program


def _free_port(host: str) -> int:
    with socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        port: int = probe.getsockname()[1]
        return port


def _spawn(program: str, bind_host: str, port: int) -> subprocess.Popen[bytes]:
    """Start the program through subprocess, which forks without gRPC's fork handlers."""
    command = [sys.executable, "-m", "weft.kv.parent_death", str(os.getpid()), program]
    options = {
        "rpc_address": bind_host,
        "rpc_port": port,
        # its metrics and admin interface is for this machine only
        "metrics_host": "127.0.0.1",
        "metrics_port": _free_port("127.0.0.1"),
        "enable_metric_reporting": "false",
        # How long a block that was just found or read cannot be evicted. Blocks are read at once to be spilled, so the
        # store accepts at most its own size in this time.
        "default_kv_lease_ttl": LEASE_MS,
        # share of memory that one eviction frees
        "eviction_ratio": 0.1,
    }
    return subprocess.Popen(
        [*command, *(f"--{name}={value}" for name, value in options.items())],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        # Two heaps for all threads: one per thread keeps memory that others could use, and takes hours to reach its
        # peak.
        env={"MALLOC_ARENA_MAX": "2", **os.environ, "GLOG_minloglevel": "2"},
        # the service handles Ctrl-C itself
        start_new_session=True,
    )


async def _until_listening(process: subprocess.Popen[bytes], host: str, port: int) -> None:
    try:
        async with asyncio.timeout(START_SECONDS):
            while process.poll() is None:
                try:
                    _, writer = await asyncio.open_connection(host, port)
                except OSError:
                    await asyncio.sleep(POLL_SECONDS)
                    continue
                writer.close()
                return
    except TimeoutError:
        raise StoreLost(f"{PROGRAM} did not listen on {host}:{port} within {START_SECONDS:.0f} s") from None
    raise StoreLost(f"{PROGRAM} ended with status {process.returncode}; is port {port} taken?")
