"""The sending process of the hand-off benchmark: registers memory, prints its address, waits until it is killed."""

from __future__ import annotations

import ctypes
import json
import signal
import sys

from weft.kv.memfd import SharedMemory, create_shared_memory
from weft.kv.mooncake import MooncakeTransport
from weft.kv.transfer import HostBlocks, LocalTransport


def shared_pool(size: int) -> tuple[SharedMemory, HostBlocks]:
    """Memory as a CPU worker's pool is: in a file."""
    shared = create_shared_memory(size, "weft-kv-pool")
    if shared is None:
        sys.exit("this system has no files without a path")
    return shared, HostBlocks(ctypes.addressof(ctypes.c_ubyte.from_buffer(shared.mapping)), size, 1, shared.fd)


def main() -> None:
    """Arguments: bytes."""
    size = int(sys.argv[1])
    _shared, memory = shared_pool(size)
    ctypes.memset(memory.address, 7, size)
    transport = MooncakeTransport("127.0.0.1")
    transport.register(memory.address, size)
    endpoint = LocalTransport(memory).with_file(transport.endpoint())
    print(
        json.dumps({"segment": endpoint.segment, "address": endpoint.pool_address, "file": endpoint.file}), flush=True
    )
    signal.pause()


if __name__ == "__main__":
    main()
