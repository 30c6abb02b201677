"""What Mooncake's wheels for GPUs name and do not bring: the CUDA runtime, which pip puts where no loader looks.

It comes with torch, and a process that has imported torch has it. Those that have not call `load_cuda_runtime` before
they import `mooncake`. Run as `python -m weft.kv.mooncake_loading` this loads all of Mooncake that Weft uses, or fails
with the reason in its last line.
"""

from __future__ import annotations

import ctypes
import importlib.util
from contextlib import suppress
from pathlib import Path


def load_cuda_runtime() -> None:
    """Silent where there is none, or none that loads: if Mooncake needs it, importing that says what is missing."""
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec and spec.submodule_search_locations) or ():
        for library in sorted(Path(folder).glob("*/lib/libcudart.so.*")):
            with suppress(OSError):
                ctypes.CDLL(str(library))


def main() -> None:
    """Load it, as a worker and its store's process do. Raises ImportError or OSError."""
    load_cuda_runtime()
    from mooncake.engine import TransferEngine as _Engine
    from mooncake.store import MooncakeDistributedStore as _Store

    _ = _Engine, _Store


if __name__ == "__main__":
    main()
