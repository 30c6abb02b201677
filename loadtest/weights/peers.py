"""Other loaders, run by the Python of their own environment: `peers.py NAME DIRECTORY THREADS` prints seconds.

Imports nothing of Weft's. A loader has loaded when every page of every tensor is in memory.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def safetensors(files: list[str], num_threads: int) -> float:
    from safetensors.torch import load_file

    began = time.perf_counter()
    held = [load_file(file) for file in files]
    for tensors in held:
        touch(tensors.values())
    return time.perf_counter() - began


def fastsafetensors(files: list[str], num_threads: int) -> float:
    from fastsafetensors import SafeTensorsFileLoader, SingleGroup

    began = time.perf_counter()
    loader = SafeTensorsFileLoader(SingleGroup(), "cpu", max_threads=num_threads, nogds=True)
    loader.add_filenames({0: files})
    held = loader.copy_files_to_device()
    touch(held.get_tensor(key) for key in held.key_to_rank_lidx)
    return time.perf_counter() - began


def runai_model_streamer(files: list[str], num_threads: int) -> float:
    import os

    os.environ["RUNAI_STREAMER_CONCURRENCY"] = str(num_threads)
    from runai_model_streamer import SafetensorsStreamer

    began = time.perf_counter()
    with SafetensorsStreamer() as streamer:
        streamer.stream_files(files)
        # what it yields lies in a buffer of its own that is used again, so it is kept by copying, as its users do
        held = {name: tensor.clone() for name, tensor in streamer.get_tensors()}
        touch(held.values())
    return time.perf_counter() - began


def touch(tensors: Any) -> None:
    import torch

    for tensor in tensors:
        tensor.reshape(-1).view(torch.uint8)[::4096].sum()


PEERS: dict[str, Callable[[list[str], int], float]] = {
    "safetensors": safetensors,
    "fastsafetensors": fastsafetensors,
    "runai_model_streamer": runai_model_streamer,
}

if __name__ == "__main__":
    import torch  # noqa: F401  # imports are not what is measured

    name, directory, threads = sys.argv[1:]
    print(PEERS[name](sorted(str(path) for path in Path(directory).glob("*.safetensors")), int(threads)))
