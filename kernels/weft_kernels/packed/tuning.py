"""The quickest tiles of a product by form, shape and rows: tried out once on a GPU, and kept in a file that machines
with the same GPU and versions can share. Where nothing was tried, the launcher's own choice stands. Knows no kernel.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch
import triton
from torch import Tensor
from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources, PTXASError

from weft_kernels.cache_dir import user_cache_dir
from weft_kernels.launch import next_power_of_2

logger = logging.getLogger(__name__)
Tiles = dict[str, int]
Timer = Callable[[Sequence[Callable[[], Tensor]]], float]
"""Seconds of one of several calls."""
REFUSALS = (OutOfResources, CompilationError, PTXASError, torch.OutOfMemoryError)
"""What a device says of tiles that take more than it has."""
LEAST_ROWS, MOST_ROWS = 8, 1024
LOOK_SECONDS = 0.1
# that share a GPU of 132 multiprocessors, where a matrix alone has fewer tiles: two for each of them, three, or four
FEW_PROGRAMS, MANY_PROGRAMS = 264, 528
PROGRAMS = (FEW_PROGRAMS, 396, MANY_PROGRAMS)


class TuningTable:
    """Of one kind of device; `identity` says which, and is repeated in the file."""

    def __init__(self, directory: Path, identity: Mapping[str, str]) -> None:
        digest = hashlib.blake2b(json.dumps(identity, sort_keys=True).encode(), digest_size=10).hexdigest()
        self.path = directory / f"{digest}.json"
        self._identity = dict(identity)
        self._tiles = self._read()
        self._found: dict[str, Tiles] = {}

    def of(self, form: str, outputs: int, inputs: int, num_rows: int) -> Tiles | None:
        """What was quickest for so many rows, rounded up to a power of two, or for MOST_ROWS where they are more;
        nothing where it was not tried."""
        return self._tiles.get(_key(form, outputs, inputs, num_rows))

    def tune(
        self,
        shape: tuple[str, int, int, int],
        candidates: Iterable[Tiles],
        seconds: Callable[[Tiles], float],
    ) -> Tiles | None:
        """Try all for `shape` (form, outputs, inputs, rows), keep the quickest; what the device refuses is left out."""
        found: list[tuple[float, Tiles]] = []
        for tiles in candidates:
            try:
                found.append((seconds(tiles), tiles))
            except REFUSALS as error:
                logger.debug("%s: %s does not run: %s", shape, tiles, error)
        if not found:
            return None
        _, best = min(found, key=lambda each: each[0])
        self._tiles[_key(*shape)] = self._found[_key(*shape)] = best
        return best

    @property
    def digest(self) -> str:
        """Of what is in it."""
        return hashlib.blake2b(json.dumps(self._tiles, sort_keys=True).encode(), digest_size=10).hexdigest()

    def save(self) -> None:
        """What was found here goes beside what other processes have saved meanwhile. Raises OSError."""
        with self._locked(self._directory()):
            self._tiles = self._read() | self._found
            partial = self.path.with_suffix(f".{os.getpid()}")
            partial.write_text(json.dumps({"identity": self._identity, "tiles": self._tiles}, indent=1))
            partial.replace(self.path)

    @contextmanager
    def exclusive(self, wait_seconds: float) -> Iterator[bool]:
        """Yield True while no other process on this machine measures, with its saved results loaded.

        Yields False after `wait_seconds`. Concurrent measurements would disturb each other. Raises OSError.
        """
        busy, deadline = self._directory() / f"{self.path.stem}.busy", time.monotonic() + wait_seconds
        busy.touch(mode=0o600)
        with self._locked(busy, deadline) as is_alone:
            self._tiles = self._read() | self._found
            yield is_alone

    def _directory(self) -> Path:
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        return self.path.parent

    @staticmethod
    @contextmanager
    def _locked(path: Path, deadline: float | None = None) -> Iterator[bool]:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            while deadline is not None:
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() >= deadline:
                        yield False
                        return
                    time.sleep(LOOK_SECONDS)
            else:
                fcntl.flock(fd, fcntl.LOCK_EX)  # held for as long as writing a small file takes
            yield True
        finally:
            os.close(fd)

    def _read(self) -> dict[str, Tiles]:
        try:
            kept = json.loads(self.path.read_text())
            tiles = {
                str(key): {str(name): int(size) for name, size in each.items()} for key, each in kept["tiles"].items()
            }
            return tiles if kept["identity"] == self._identity else {}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            logger.warning("%s: not a table of tiles: %s", self.path, error)
            return {}


@cache
def table_of(device_name: str) -> TuningTable:
    """The table of this kind of GPU, with these versions of what compiles for it."""
    sources = hashlib.blake2b(digest_size=10)
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        sources.update(path.read_bytes())
    versions = {"torch": torch.__version__, "triton": triton.__version__, "sources": sources.hexdigest()}
    return TuningTable(directory(), {"device": device_name, **versions})


def directory() -> Path:
    """The folder of tuning tables in the user's cache, which machines can share through $XDG_CACHE_HOME."""
    return user_cache_dir() / "tuning"


def candidates(form: str, num_rows: int) -> list[Tiles]:
    """Tiles worth trying: few rows wait for weights, many are multiplied."""
    if form == "F12":
        return [{**tiles, "programs": programs} for programs in PROGRAMS for tiles in _f12_tiles(num_rows)]
    most = min(128, max(16, next_power_of_2(num_rows)))
    heights = (most,) if most <= 64 else (64, 128)
    return [
        _named(height, width, depth, warps, stages)
        for height in heights
        for width in (32, 64, 128)
        for depth in (128, 256)
        for warps in (4, 8)
        for stages in (2, 3, 4)
        if height * width >= 256 * warps  # a warp has work
    ]


def tiles_of_f12(num_rows: int) -> Tiles:
    """Those that were quickest for most matrices of an 8B and a 70B model on an H200."""
    return {**_f12_tiles(num_rows)[0], "programs": MANY_PROGRAMS if num_rows <= LEAST_ROWS else FEW_PROGRAMS}


def _f12_tiles(num_rows: int) -> list[Tiles]:
    """The likeliest first. Warps of 16 rows each use the multipliers that older GPUs have too, which is enough for few
    rows; a step takes all 256 columns that lie together where shared memory holds three steps of them."""
    sizes = {
        8: ((8, 32, 256, 2, 4), (8, 64, 256, 4, 2), (8, 64, 256, 4, 4), (8, 16, 256, 1, 6)),
        16: ((16, 64, 256, 4, 3), (16, 32, 256, 2, 4), (16, 64, 256, 4, 2)),
        32: ((32, 64, 256, 4, 3), (32, 64, 256, 4, 2), (32, 64, 128, 4, 4)),
        64: ((64, 64, 256, 4, 2), (64, 64, 256, 4, 3), (64, 64, 128, 4, 4), (64, 128, 128, 8, 3)),
        128: ((128, 128, 128, 8, 3), (128, 64, 128, 4, 3), (64, 64, 128, 4, 4)),
    }
    return [_named(*each) for each in sizes[min(128, max(LEAST_ROWS, next_power_of_2(num_rows)))]]


def _named(height: int, width: int, depth: int, warps: int, stages: int) -> Tiles:
    return {"BLOCK_M": height, "BLOCK_N": width, "BLOCK_K": depth, "num_warps": warps, "num_stages": stages}


def row_classes(rows: Iterable[int]) -> list[int]:
    """The largest of all that share tiles with these, the fewest first."""
    return sorted({_rounded(each) for each in rows})


def _rounded(num_rows: int) -> int:
    power = next_power_of_2(num_rows)
    return min(MOST_ROWS, max(LEAST_ROWS, power))


def _key(form: str, outputs: int, inputs: int, num_rows: int) -> str:
    return f"{form} {outputs}x{inputs} {_rounded(num_rows)}"
