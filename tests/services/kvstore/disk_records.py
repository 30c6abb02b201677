"""Records of a disk tier whose bytes tell their number, and how to put them there and look for them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import xxhash

from weft_services.kvstore.disk import DiskTier
from weft_services.kvstore.disk_index import DiskLimits
from weft_services.kvstore.segment import HEADER_BYTES, RecordHeader

MODEL = b"m" * 16
SIZE = 4096
RECORD = HEADER_BYTES + SIZE
MIB = 1024 * 1024


def body(number: int) -> bytes:
    return number.to_bytes(4, "little") * (SIZE // 4)


def key(number: int) -> bytes:
    return number.to_bytes(32, "little")


def record(number: int, tenant: bytes = b"", stored_at: float = 0.0) -> tuple[RecordHeader, memoryview]:
    data = body(number)
    header = RecordHeader(MODEL, tenant, key(number), SIZE, xxhash.xxh3_64_intdigest(data), stored_at)
    return header, memoryview(data)


async def opened(directory: Path, max_bytes: int = MIB, **limits: Any) -> DiskTier:
    disk = DiskTier(directory, DiskLimits(max_bytes, **limits))
    await disk.open()
    return disk


async def written(disk: DiskTier, numbers: Sequence[int]) -> None:
    assert await disk.write([record(number) for number in numbers]) == len(numbers)


async def read(disk: DiskTier, numbers: Sequence[int]) -> int:
    """How many leading blocks came; each of them is right."""
    bodies = [memoryview(bytearray(SIZE)) for _ in numbers]
    count = await disk.read(MODEL, [key(number) for number in numbers], bodies)
    assert [bytes(data) for data in bodies[:count]] == [body(number) for number in numbers[:count]]
    return count


def there(disk: DiskTier, numbers: Sequence[int]) -> list[int]:
    return [number for number in numbers if disk.find(MODEL, key(number)) is not None]


def files(directory: Path) -> list[Path]:
    return list(directory.glob("*.kvlog"))


def damage(directory: Path, place: int, flip: int) -> None:
    """Another byte at this place of the only file."""
    [file] = files(directory)
    data = bytearray(file.read_bytes())
    data[place] ^= flip
    file.write_bytes(data)
