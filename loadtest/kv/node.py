"""A kvstore of one's own as a process, with its Mooncake children, and its files out of the page cache on demand."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Self

import grpc
import psutil

from weft.cli.child import die_with
from weft_mesh.v1 import kvstore_service_pb2 as pb2
from weft_mesh.v1 import kvstore_service_pb2_grpc as pb2_grpc

START_SECONDS = 60.0
POLL_SECONDS = 0.05


class KvStoreNode:
    """Running while the block lasts, on one address over restarts. 0 `disk_bytes`: memory alone."""

    def __init__(self, segment_bytes: int, disk: Path, disk_bytes: int) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.address = f"127.0.0.1:{probe.getsockname()[1]}"
        self._disk = disk
        self._environment = {
            **os.environ,
            "WEFT_PORT": self.address.rpartition(":")[2],
            "WEFT_STORE_MEMORY_BYTES": str(segment_bytes),
            "WEFT_LOG_LEVEL": "WARNING",
        }
        if disk_bytes:
            self._environment |= {"WEFT_DISK_PATH": str(disk), "WEFT_DISK_BYTES": str(disk_bytes)}
        self._process: psutil.Popen | None = None

    def __enter__(self) -> Self:
        command = [sys.executable, "-m", "weft_services.kvstore"]
        parent = os.getpid()
        self._process = psutil.Popen(
            command,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            # a benchmark that is killed takes its store along
            preexec_fn=lambda: die_with(parent, signal.SIGTERM),
        )
        self.describe()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process is not None
        family = [self._process, *self._process.children(recursive=True)]
        self._process.terminate()
        _, alive = psutil.wait_procs(family, timeout=10)
        for process in alive:
            process.kill()

    def restart(self) -> None:
        """What is in memory is lost."""
        self.__exit__(None, None, None)
        self.__enter__()

    def describe(self) -> pb2.DescribeResponse:
        """What it says of itself, once it is ready."""
        deadline = time.monotonic() + START_SECONDS
        with grpc.insecure_channel(self.address) as channel:
            stub = pb2_grpc.KvStoreServiceStub(channel)
            while True:
                try:
                    return stub.Describe(pb2.DescribeRequest(), timeout=1.0)
                except grpc.RpcError as error:
                    if time.monotonic() > deadline:
                        raise TimeoutError(f"the kvstore at {self.address} does not answer: {error}") from error
                time.sleep(POLL_SECONDS)

    def forget_cached(self) -> None:
        """Write the disk tier's files out and drop them from the page cache: reads come from the device."""
        for path in self._disk.glob("*.kvlog"):
            fd = os.open(path, os.O_RDONLY)
            try:
                os.fdatasync(fd)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)
