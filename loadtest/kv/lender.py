"""The other process of the hand-off benchmark: registers memory, says where it lies, waits to be killed."""

from __future__ import annotations

import ctypes
import json
import signal
import sys

from weft.kv.mooncake import MooncakeTransport


def main() -> None:
    """Arguments: bytes."""
    size = int(sys.argv[1])
    memory = (ctypes.c_ubyte * size)()
    ctypes.memset(memory, 7, size)
    transport = MooncakeTransport("127.0.0.1")
    transport.register(ctypes.addressof(memory), size)
    endpoint = transport.endpoint()
    print(json.dumps({"segment": endpoint.segment, "address": endpoint.pool_address}), flush=True)
    signal.pause()


if __name__ == "__main__":
    main()
