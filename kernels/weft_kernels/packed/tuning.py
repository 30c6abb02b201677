"""The quickest tiles of a product by form, shape and rows: tried out once on a GPU, and kept in a file that machines
with the same GPU and versions can share. Where nothing was tried, the launcher's own choice stands. Knows no kernel.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path

import torch
import triton

logger = logging.getLogger(__name__)
Tiles = dict[str, int]
LEAST_ROWS, MOST_ROWS = 16, 1024
DIRECTORY = "WEFT_TUNING_CACHE"


class TuningTable:
    """Of one kind of device; `identity` says which, and is repeated in the file."""

    def __init__(self, directory: Path, identity: Mapping[str, str]) -> None:
        digest = hashlib.blake2b(json.dumps(identity, sort_keys=True).encode(), digest_size=10).hexdigest()
        self.path = directory / f"{digest}.json"
        self._identity = dict(identity)
        self._tiles = self._read()

    def of(self, form: str, outputs: int, inputs: int, num_rows: int) -> Tiles | None:
        """What was quickest for so many rows, rounded up to a power of two; nothing where it was not tried."""
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
            except (triton.runtime.errors.OutOfResources, triton.compiler.errors.CompilationError) as error:
                logger.debug("%s: %s does not run: %s", shape, tiles, error)
        if not found:
            return None
        _, best = min(found, key=lambda each: each[0])
        self._tiles[_key(*shape)] = best
        return best

    @property
    def digest(self) -> str:
        """Of what is in it."""
        return hashlib.blake2b(json.dumps(self._tiles, sort_keys=True).encode(), digest_size=10).hexdigest()

    def save(self) -> None:
        """Whole or not at all; another process' table of the same device is replaced. Raises OSError."""
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        partial = self.path.with_suffix(f".{os.getpid()}")
        partial.write_text(json.dumps({"identity": self._identity, "tiles": self._tiles}, indent=1))
        partial.replace(self.path)

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
    for path in sorted(Path(__file__).parent.glob("*.py")):
        sources.update(path.read_bytes())
    versions = {"torch": torch.__version__, "triton": triton.__version__, "sources": sources.hexdigest()}
    return TuningTable(directory(), {"device": device_name, **versions})


def directory() -> Path:
    """With the user, or where several machines share it ($WEFT_TUNING_CACHE)."""
    if chosen := os.environ.get(DIRECTORY):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "weft" / "tuning"


def candidates(num_rows: int) -> list[Tiles]:
    """Tiles worth trying: few rows wait for weights, many are multiplied."""
    most = min(128, max(LEAST_ROWS, triton.next_power_of_2(num_rows)))
    heights = (most,) if most <= 64 else (64, 128)
    return [
        {"BLOCK_M": height, "BLOCK_N": width, "BLOCK_K": depth, "num_warps": warps, "num_stages": stages}
        for height in heights
        for width in (32, 64, 128)
        for depth in (128, 256)
        for warps in (4, 8)
        for stages in (2, 3, 4)
        if height * width >= 256 * warps  # a warp has work
    ]


def _key(form: str, outputs: int, inputs: int, num_rows: int) -> str:
    rows = min(MOST_ROWS, max(LEAST_ROWS, triton.next_power_of_2(num_rows)))
    return f"{form} {outputs}x{inputs} {rows}"
