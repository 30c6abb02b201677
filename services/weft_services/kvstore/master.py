"""The Mooncake master as a child process: which object lies in whose segment. Its program comes with the wheel."""

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
    """A running master; `address` is how clients reach it."""

    def __init__(self, process: subprocess.Popen[bytes], address: str) -> None:
        self.address = address
        self._process = process

    @classmethod
    async def start(cls, bind_host: str, host: str, port: int) -> Master:
        """Start and wait until it listens. Port 0 takes a free one. Raises StoreLost."""
        program = _find_program()
        try:
            port = port or _free_port(bind_host)
            process = _spawn(program, bind_host, port)
        except OSError as error:  # no more files or processes may be had for a while
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
        """Has it not ended."""
        return self._process.poll() is None

    async def stop(self) -> None:
        """It holds nothing that is worth a farewell."""
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
    """By subprocess, which forks without running gRPC's fork handlers."""
    command = [sys.executable, "-m", "weft.kv.parent_death", str(os.getpid()), program]
    options = {
        "rpc_address": bind_host,
        "rpc_port": port,
        # its own metrics and admin interface: nobody's business but this machine's
        "metrics_host": "127.0.0.1",
        "metrics_port": _free_port("127.0.0.1"),
        "enable_metric_reporting": "false",
        # how long a block that was just found or read cannot be evicted; what is put is read at once, to be spilled, so
        # the store takes no more than its size in such a time
        "default_kv_lease_ttl": LEASE_MS,
        # how much goes at a time when room is needed
        "eviction_ratio": 0.1,
    }
    return subprocess.Popen(
        [*command, *(f"--{name}={value}" for name, value in options.items())],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        # its threads share two heaps: one each keeps what others could use, and takes hours to reach its peak
        env={"MALLOC_ARENA_MAX": "2", **os.environ, "GLOG_minloglevel": "2"},
        # a Ctrl-C in the terminal is for the service to act on
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
