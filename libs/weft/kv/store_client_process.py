"""A Mooncake Store client in its own process: JSON lines with `store_client_proxy`, block bytes in shared memory.

Setup and close of the library hold the GIL for 20 s and more if the master is frozen or dead. A read that timed out may
still be written; here it can hit only the staging area, and ending the process ends every transfer for certain. A
worker's pool is read in place and never written.

Each operation has its own thread, so that a lookup does not wait for a put. The library's object is thread-safe and
releases the GIL in each call.
"""

from __future__ import annotations

import json
import os
import sys
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Lock
from typing import Any, TextIO

from weft.kv.memfd import map_file
from weft.kv.mooncake import load_cuda_runtime
from weft.kv.parent_death import die_with_parent

_ENVIRONMENT = {
    "MC_LOG_LEVEL": "ERROR",
    # Calls to a frozen master end after this instead of 30 s.
    "MC_RPC_TIMEOUT_MS": "1000",
    "MC_STORE_CLIENT_SETUP_RETRIES": "1",
    # Without this, every transfer leaves a socket in TIME_WAIT.
    "MC_TCP_ENABLE_CONNECTION_POOL": "1",
}
Areas = dict[str, int]


def open_store(spec: dict[str, Any]) -> tuple[Any, Areas]:
    """Return the library's store object and the addresses of the areas `staging` and `pool`, if present.

    Raises RuntimeError with the reason, or OSError.
    """
    for variable, value in _ENVIRONMENT.items():
        os.environ.setdefault(variable, value)
    load_cuda_runtime()
    try:
        from mooncake.store import MooncakeDistributedStore
    except (ImportError, OSError) as error:
        raise RuntimeError(f"the mooncake library cannot be loaded: {error}") from error
    store = MooncakeDistributedStore()
    code = store.setup(spec["host"], "P2PHANDSHAKE", spec["segment_bytes"], 0, spec["protocol"], "", spec["master"])
    if code != 0:
        raise RuntimeError(f"no store at the master {spec['master']}: setup returned {code}")
    areas: Areas = {}
    # RDMA registers memory for writing too; over TCP the mapping can be read-only.
    for area, is_writable in (("staging", True), ("pool", spec["protocol"] != "tcp")):
        if size := spec[f"{area}_bytes"]:
            areas[area] = map_file(spec[f"{area}_fd"], size, is_writable)
            if (code := store.register_buffer(areas[area], size)) != 0:
                raise RuntimeError(f"register_buffer returned {code} for the {area}")
    return store, areas


def execute(store: Any, areas: Areas, request: dict[str, Any]) -> list[int]:
    """Run a request; return one code a key.

    exist and probe: 1 or 0; put and remove: 0; get: the size. Failures are negative.
    """
    keys = request["keys"]
    if request["op"] in ("exist", "probe"):
        return list(store.batch_is_exist(keys))
    if request["op"] == "remove":
        return list(store.batch_remove(keys))
    base = areas[request.get("area", "staging")]
    addresses = [base + offset for offset in request["offsets"]]
    sizes = [request["size"]] * len(keys)
    if request["op"] == "get":
        return list(store.batch_get_into(keys, addresses, sizes))
    codes = list(store.batch_put_from(keys, addresses, sizes))
    # The library evicts unread objects first; this lookup keeps them until kvstore has copied them to disk.
    store.batch_is_exist([key for key, code in zip(keys, codes, strict=True) if code == 0])
    return codes


def main() -> None:
    """Set up, report it, then answer until stdin ends; calls of one operation run in order."""
    spec = json.loads(sys.argv[1])
    die_with_parent(spec["parent_pid"])
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # The library's output must not mix with replies.
    try:
        store, areas = open_store(spec)
    except (RuntimeError, OSError) as error:
        _reply(replies, {"error": str(error)})
        return
    _reply(replies, {"op": "setup", "codes": []})
    lanes: defaultdict[str, ThreadPoolExecutor] = defaultdict(partial(ThreadPoolExecutor, 1))
    is_writing = Lock()
    for line in sys.stdin:
        request = json.loads(line)
        lanes[request["op"]].submit(_answer, store, areas, request, partial(_reply_alone, is_writing, replies))


def _answer(store: Any, areas: Areas, request: dict[str, Any], reply: Callable[[dict[str, Any]], None]) -> None:
    try:
        codes = execute(store, areas, request)
    except Exception as error:
        # Callers of this call and of later ones must receive the error.
        reply({"error": f"{request['op']}: {error!r}"})
    else:
        reply({"op": request["op"], "codes": codes})


def _reply_alone(is_writing: Lock, replies: TextIO, reply: dict[str, Any]) -> None:
    with is_writing:
        _reply(replies, reply)


def _reply(replies: TextIO, reply: dict[str, Any]) -> None:
    replies.write(json.dumps(reply) + "\n")


if __name__ == "__main__":
    main()
