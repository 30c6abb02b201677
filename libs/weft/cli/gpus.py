"""The NVIDIA GPUs of this machine as nvidia-smi lists them, and their assignment to workers. Imports no torch."""

from __future__ import annotations

import itertools
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

ASK_SECONDS = 60.0
# CUDA's variable for the devices that a process may use
VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True, slots=True)
class Card:
    """A GPU as nvidia-smi reports it; 0 bytes: not reported."""

    name: str
    total_bytes: int
    free_bytes: int
    driver: str


def cards() -> list[Card]:
    """Return the NVIDIA GPUs of this machine; none if nvidia-smi fails."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total,memory.free,driver_version", "--format=csv,noheader,nounits"]
    try:
        ended = subprocess.run(query, capture_output=True, text=True, timeout=ASK_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    rows = [line.split(", ") for line in ended.stdout.splitlines()] if ended.returncode == 0 else []
    return [Card(row[0], _mebibytes(row[1]), _mebibytes(row[2]), row[3]) for row in rows if len(row) == 4]


def _mebibytes(text: str) -> int:
    """Return bytes. nvidia-smi prints no number where GPU and processor share their memory."""
    return int(text) << 20 if text.isdecimal() else 0


def all_report_memory(found: Sequence[Card]) -> bool:
    """Return whether nvidia-smi reports the memory of each GPU."""
    return bool(found) and all(card.total_bytes for card in found)


def usable_gpus(environ: Mapping[str, str], found: Sequence[Card] | None = None) -> tuple[str, ...]:
    """Return CUDA's names of the usable GPUs: those of CUDA_VISIBLE_DEVICES up to the first invalid one, else all.

    `found` saves a call of nvidia-smi.
    """
    if VISIBLE in environ:
        chosen = filter(None, (name.strip() for name in environ[VISIBLE].split(",")))
        return tuple(itertools.takewhile(lambda name: not name.startswith("-"), chosen))
    return tuple(str(number) for number in range(len(cards() if found is None else found)))


def chosen_cards(found: Sequence[Card], gpus: Sequence[str]) -> list[Card]:
    """Return the GPUs with these names; all if a name is no valid number."""
    numbers = [int(name) for name in gpus if name.isdecimal() and int(name) < len(found)]
    return [found[number] for number in numbers] if len(numbers) == len(gpus) else list(found)


def gpu_settings(gpus: Sequence[str], num_workers: int, index: int) -> dict[str, str]:
    """Return the settings of one worker: its GPU, round-robin, and its share of a GPU with several workers."""
    if not gpus:
        return {}
    turn = index % len(gpus)
    num_sharing = len(range(turn, num_workers, len(gpus)))
    return {VISIBLE: gpus[turn], "WEFT_GPU_SHARE": f"{1 / num_sharing:.4f}"}
