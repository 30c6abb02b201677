"""Loads the CUDA runtime, which Mooncake's GPU wheels need and pip installs where no loader looks.

torch loads it too. A process without torch calls `load_cuda_runtime` before it imports `mooncake`. `python -m
weft.kv.mooncake_loading` loads all of Mooncake that Weft uses, or fails with the reason in its last line.
"""

from __future__ import annotations

import ctypes
import importlib.util
from contextlib import suppress
from pathlib import Path


def load_cuda_runtime() -> None:
    """Load it if it exists. If Mooncake needs a missing one, importing Mooncake reports it."""
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec and spec.submodule_search_locations) or ():
        for library in sorted(Path(folder).glob("*/lib/libcudart.so.*")):
            with suppress(OSError):
                ctypes.CDLL(str(library))


def main() -> None:
    """Load Mooncake as a worker and its store process do. Raises ImportError or OSError."""
    load_cuda_runtime()
    from mooncake.engine import TransferEngine as _Engine
    from mooncake.store import MooncakeDistributedStore as _Store

    _ = _Engine, _Store


if __name__ == "__main__":
    main()
