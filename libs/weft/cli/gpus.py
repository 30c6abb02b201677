"""The NVIDIA GPUs of this machine, and whose each is among a mesh's workers. Knows nvidia-smi, no torch."""

from __future__ import annotations

import itertools
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

ASK_SECONDS = 60.0
# what CUDA itself calls the devices that a process may use
VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True, slots=True)
class Card:
    """A GPU as nvidia-smi tells of it. Bytes 0: it does not say."""

    name: str
    total_bytes: int
    free_bytes: int
    driver: str


def cards() -> list[Card]:
    """The NVIDIA GPUs of this machine."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total,memory.free,driver_version", "--format=csv,noheader,nounits"]
    try:
        ended = subprocess.run(query, capture_output=True, text=True, timeout=ASK_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    rows = [line.split(", ") for line in ended.stdout.splitlines()] if ended.returncode == 0 else []
    return [Card(row[0], _mebibytes(row[1]), _mebibytes(row[2]), row[3]) for row in rows if len(row) == 4]


def _mebibytes(told: str) -> int:
    """In bytes. Where GPU and processor share their memory, nvidia-smi tells no number."""
    return int(told) << 20 if told.isdecimal() else 0


def all_report_memory(found: Sequence[Card]) -> bool:
    """Is it known how much each of them has."""
    return bool(found) and all(card.total_bytes for card in found)


def usable_gpus(environ: Mapping[str, str], found: Sequence[Card] | None = None) -> tuple[str, ...]:
    """As CUDA calls them: those that the user has chosen, up to the first that there cannot be (-1: none), else all
    (those `found`, where they have been looked for)."""
    if VISIBLE in environ:
        chosen = filter(None, (name.strip() for name in environ[VISIBLE].split(",")))
        return tuple(itertools.takewhile(lambda name: not name.startswith("-"), chosen))
    return tuple(str(number) for number in range(len(cards() if found is None else found)))


def chosen_cards(found: Sequence[Card], gpus: Sequence[str]) -> list[Card]:
    """Those that are called so; where a name is not a number of one, all."""
    numbers = [int(name) for name in gpus if name.isdecimal() and int(name) < len(found)]
    return [found[number] for number in numbers] if len(numbers) == len(gpus) else list(found)


def gpu_settings(gpus: Sequence[str], num_workers: int, index: int) -> dict[str, str]:
    """One worker's GPU, in turn, and its part of the memory where there are more workers than GPUs."""
    if not gpus:
        return {}
    turn = index % len(gpus)
    num_sharing = len(range(turn, num_workers, len(gpus)))
    return {VISIBLE: gpus[turn], "WEFT_GPU_SHARE": f"{1 / num_sharing:.4f}"}
