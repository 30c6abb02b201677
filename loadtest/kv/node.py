"""A kvstore process of a benchmark's own, with its Mooncake children, whose files leave the page cache on demand."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Self

import grpc

from loadtest.processes import Processes
from weft.cli.layout import free_ports
from weft_mesh.v1 import kvstore_service_pb2 as pb2
from weft_mesh.v1 import kvstore_service_pb2_grpc as pb2_grpc

START_SECONDS = 60.0


class KvStoreNode(Processes):
    """A kvstore that runs inside the block, on one address over restarts; memory alone if `disk_bytes` is 0."""

    def __init__(self, segment_bytes: int, disk: Path, disk_bytes: int) -> None:
        super().__init__()
        (port,) = free_ports(1)
        self.address = f"127.0.0.1:{port}"
        self._disk = disk
        self._environment = {
            "WEFT_PORT": str(port),
            "WEFT_STORE_MEMORY_BYTES": str(segment_bytes),
            "WEFT_LOG_LEVEL": "WARNING",
        }
        if disk_bytes:
            self._environment |= {"WEFT_DISK_PATH": str(disk), "WEFT_DISK_BYTES": str(disk_bytes)}

    def __enter__(self) -> Self:
        self.start([sys.executable, "-m", "weft_services.kvstore"], self._environment)
        self.wait("the kvstore", self._answers, START_SECONDS)
        return self

    def restart(self) -> None:
        """Start it again without what was in memory."""
        self.stop()
        self.__enter__()

    def describe(self) -> pb2.DescribeResponse:
        """Return what it says of itself. Raises RpcError while it does not answer."""
        with grpc.insecure_channel(self.address) as channel:
            return pb2_grpc.KvStoreServiceStub(channel).Describe(pb2.DescribeRequest(), timeout=1.0)

    def _answers(self) -> bool:
        try:
            self.describe()
        except grpc.RpcError:
            return False
        return True

    def forget_cached(self) -> None:
        """Sync the disk tier's files and drop them from the page cache, so that reads come from the device."""
        for path in self._disk.glob("*.kvlog"):
            fd = os.open(path, os.O_RDONLY)
            try:
                os.fdatasync(fd)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)
