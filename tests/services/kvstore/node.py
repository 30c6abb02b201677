"""A kvstore as a process of its own, with its Mooncake children, and ways to hurt each of them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from weft.cli.layout import free_ports
from weft.worker import store_connection

PATIENCE_SECONDS = 30.0
POLL_SECONDS = 0.02
SERVING = health_pb2.HealthCheckResponse.SERVING


async def until(what: str, condition: Callable[[], bool]) -> None:
    """Wait for something that another process brings about."""
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not condition():  # noqa: ASYNC110 (another process brings it about)
                await asyncio.sleep(POLL_SECONDS)
    except TimeoutError:
        raise AssertionError(f"still not: {what}") from None


@contextmanager
def patient_look_ups() -> Iterator[None]:
    """Clients in this process wait for what is in the store, however long that takes on a busy machine: an answer that
    is late counts as nothing found."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store_connection, "MATCH_SECONDS", 10.0)
        yield


# its own question to the Mooncake master is as patient
PATIENT = """
import runpy
from weft_services.kvstore import node
node.MATCH_SECONDS = 10.0
runpy.run_module("weft_services.kvstore", run_name="__main__", alter_sys=True)
"""


class KvStoreProcess:
    """`python -m weft_services.kvstore` on a port that stays the same over restarts."""

    def __init__(self, segment_bytes: int = 64 << 20, is_patient: bool = False, **settings: str) -> None:
        """`settings`: WEFT_* variables besides."""
        self._program = ["-c", PATIENT] if is_patient else ["-m", "weft_services.kvstore"]
        self.address = f"127.0.0.1:{free_ports(1)[0]}"
        self._segment_bytes = segment_bytes
        self._settings = settings
        self._process: psutil.Popen | None = None

    @property
    def process(self) -> psutil.Popen:
        """The service itself."""
        assert self._process is not None
        return self._process

    @property
    def master(self) -> psutil.Process:
        """The Mooncake master."""
        return self._child("mooncake_master")

    @property
    def owner(self) -> psutil.Process:
        """The process whose memory holds the blocks."""
        return self._child("weft.kv.store_client_process")

    def start(self) -> None:
        """Until it says that it is ready; on a thread, where a loop must go on meanwhile."""
        environment = {
            **os.environ,
            "WEFT_PORT": self.address.rpartition(":")[2],
            "WEFT_STORE_MEMORY_BYTES": str(self._segment_bytes),
            **self._settings,
        }
        command = [sys.executable, *self._program]
        self._process = psutil.Popen(command, env=environment, stdin=subprocess.DEVNULL)
        deadline = time.monotonic() + PATIENCE_SECONDS
        try:
            while not self.is_ready():
                assert self._process.poll() is None, f"the kvstore ended with {self._process.poll()}"
                assert time.monotonic() < deadline, "the kvstore does not become ready"
                time.sleep(POLL_SECONDS)
        except BaseException:
            with contextlib.suppress(psutil.NoSuchProcess):
                self.kill()  # else other tests, which have nothing to do with it, are told that it was left behind
            raise

    def is_ready(self) -> bool:
        """What grpc.health.v1 says."""
        with grpc.insecure_channel(self.address) as channel:
            stub: Any = health_pb2_grpc.HealthStub(channel)
            try:
                answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=1.0)
            except grpc.RpcError:
                return False
            return bool(answer.status == SERVING)

    def stop(self) -> None:
        """SIGTERM, and everything has to be gone."""
        family = [self.process, *self.process.children(recursive=True)]
        for member in family:
            member.send_signal(signal.SIGCONT)
        self.process.terminate()
        _, alive = psutil.wait_procs(family, timeout=10)
        for survivor in alive:
            survivor.kill()
        assert not alive, f"outlived the kvstore: {alive}"

    def kill(self) -> list[psutil.Process]:
        """SIGKILL; returns the children that it had."""
        children: list[psutil.Process] = self.process.children(recursive=True)
        self.process.kill()
        self.process.wait()
        return children

    def _child(self, name: str) -> psutil.Process:
        for child in self.process.children(recursive=True):
            if any(name in part for part in child.cmdline()):
                return child
        raise AssertionError(f"no child {name}")
