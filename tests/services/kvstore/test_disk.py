"""The disk tier: what it keeps over a restart, what it drops, and that nothing is ever half."""

from __future__ import annotations

import asyncio
import errno
import os
import subprocess
import sys
from collections.abc import Sequence, Sized
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from weft import metrics
from weft_services.kvstore.disk import DiskTier
from weft_services.kvstore.disk_index import DiskIndex, DiskLimits
from weft_services.kvstore.record import HEADER_BYTES, RecordHeader, pack, unpack

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


async def test_what_was_written_is_found_again_by_the_next_process(tmp_path: Path) -> None:
    disk = await opened(tmp_path)
    await written(disk, range(20))
    assert await read(disk, [3, 4, 5]) == 3
    assert await read(disk, [3, 99, 5]) == 1
    disk.close()
    again = await opened(tmp_path)
    assert there(again, range(21)) == [*range(20)]
    assert await read(again, [*range(20)]) == 20
    assert again.find(b"x" * 16, key(1)) is None, "another model's blocks"
    again.close()


async def test_two_processes_never_share_a_directory(tmp_path: Path) -> None:
    disk = await opened(tmp_path)
    with pytest.raises(OSError, match="in use by another kvstore"):
        await opened(tmp_path)
    disk.close()
    (await opened(tmp_path)).close()


@pytest.mark.parametrize("cut", [1, SIZE // 2, SIZE, SIZE + 1, RECORD - 1])
async def test_a_half_written_record_is_cut_off(tmp_path: Path, cut: int) -> None:
    disk = await opened(tmp_path)
    await written(disk, range(5))
    disk.close()
    [file] = files(tmp_path)
    os.truncate(file, 5 * RECORD - cut)
    again = await opened(tmp_path)
    assert there(again, range(5)) == [0, 1, 2, 3]
    await written(again, [7])
    assert await read(again, [3, 7]) == 2
    again.close()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.integers(0, 5 * RECORD - 1), flip=st.integers(1, 255), restart=st.booleans())
async def test_a_damaged_byte_anywhere_is_a_miss_and_never_a_wrong_block(
    tmp_path_factory: pytest.TempPathFactory, place: int, flip: int, restart: bool
) -> None:
    directory = tmp_path_factory.mktemp("disk")
    disk = await opened(directory)
    await written(disk, range(5))
    if restart:
        disk.close()
    damage(directory, place, flip)
    if restart:
        disk = await opened(directory)
    for number in range(5):
        came = await read(disk, [number])
        assert came == (number in there(disk, range(5)))
    assert len(there(disk, range(5))) >= place // RECORD, "what lies before the damage is kept"
    disk.close()


async def test_a_full_disk_takes_no_more_and_hurts_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    disk = DiskTier(tmp_path, DiskLimits(MIB), clock=lambda: now)
    await disk.open()
    await written(disk, range(30))

    def half(fd: int, parts: Sequence[bytes], offset: int) -> int:
        return os.pwrite(fd, b"".join(bytes(part) for part in parts)[:1000], offset)

    monkeypatch.setattr(os, "pwritev", half)
    assert await disk.write([record(50)]) == 0
    monkeypatch.undo()
    assert await disk.write([record(51)]) == 0, "left alone for a while"
    kept = there(disk, range(60))
    assert 50 not in kept
    assert await read(disk, kept) == len(kept)
    now += 10
    assert await disk.write([record(51)]) == 1
    disk.close()
    again = await opened(tmp_path)
    assert there(again, range(60)) == [*kept, 51]
    again.close()


async def test_a_disk_without_room_answers_with_an_error_that_is_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    disk = await opened(tmp_path)
    monkeypatch.setattr(os, "pwritev", full)
    assert await disk.write([record(1)]) == 0
    disk.close()


async def test_a_disk_that_fails_while_it_makes_room_forgets_what_it_gave_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    disk = DiskTier(tmp_path, DiskLimits(64 * RECORD), clock=lambda: now)
    await disk.open()
    await written(disk, range(64))
    assert await read(disk, [*range(64)]) == 64

    def broken(*_: Any) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "preadv", broken)
    for number in range(64, 80):
        await disk.write([record(number)])
        now += 10
    monkeypatch.undo()
    kept = there(disk, range(80))
    assert len(kept) == len(disk)
    assert await read(disk, kept) == len(kept), "nothing is thought to be where it is not"
    assert sum(file.stat().st_size for file in files(tmp_path)) == disk.used_bytes <= 64 * RECORD
    disk.close()


async def test_the_limit_holds_and_what_was_read_outlives_what_was_not(tmp_path: Path) -> None:
    disk = await opened(tmp_path, max_bytes=64 * RECORD)
    for number in range(200):
        await written(disk, [number])
        if number % 10 == 0:
            assert await read(disk, [0]) == 1
        assert sum(file.stat().st_size for file in files(tmp_path)) <= 64 * RECORD
    assert there(disk, [0, 1, 2, 198, 199]) == [0, 198, 199]
    assert len(disk) >= 48
    assert await read(disk, [0]) == 1
    disk.close()


async def test_blocks_age_also_while_no_process_runs(tmp_path: Path) -> None:
    now = 1000.0
    disk = DiskTier(tmp_path, DiskLimits(MIB, ttl_seconds=60), clock=lambda: now)
    await disk.open()
    assert await disk.write([record(1, stored_at=990), record(2, stored_at=1000)]) == 2
    disk.close()
    now = 1055.0
    again = DiskTier(tmp_path, DiskLimits(MIB, ttl_seconds=60), clock=lambda: now)
    await again.open()
    assert there(again, [1, 2]) == [2]
    again.close()


async def test_a_block_with_a_time_of_its_own_ages_from_its_last_use_and_over_a_restart_from_when_it_was_stored(
    tmp_path: Path,
) -> None:
    now = 1000.0
    disk = DiskTier(tmp_path, DiskLimits(MIB), clock=lambda: now)
    await disk.open()
    header, data = record(1, stored_at=1000)
    assert await disk.write([(replace(header, idle_seconds=60), data), record(2, stored_at=1000)]) == 2
    for moment in (1050.0, 1110.0):
        now = moment
        assert there(disk, [1, 2]) == [1, 2]
    disk.close()
    again = DiskTier(tmp_path, DiskLimits(MIB), clock=lambda: now)
    await again.open()
    assert there(again, [1, 2]) == [2]
    again.close()


@pytest.mark.parametrize("num_others", [1, 5])
async def test_a_tenant_over_its_quota_loses_its_own_oldest_blocks_and_nobody_else_any(
    tmp_path: Path, num_others: int
) -> None:
    disk = await opened(tmp_path, max_bytes=200 * RECORD, tenant_share=0.1)
    for number in range(20 * num_others):
        # of five and more, no two records in a row are one tenant's
        assert await disk.write([record(number, b"small %d" % (number % num_others))]) == 1
        assert await disk.write([record(1000 + number, b"greedy")]) == 1
    for number in range(2000, 3000):
        assert await disk.write([record(number, b"greedy")]) == 1
    for again in range(2):
        assert there(disk, range(20 * num_others)) == [*range(20 * num_others)]
        assert there(disk, range(1000, 3000)) == [*range(2980, 3000)], "forgotten ones stay so over a restart"
        assert await read(disk, [*range(20 * num_others)]) == 20 * num_others
        assert sum(file.stat().st_size for file in files(tmp_path)) == disk.used_bytes <= 200 * RECORD
        disk.close()
        if not again:
            disk = await opened(tmp_path, max_bytes=200 * RECORD, tenant_share=0.1)


async def test_what_the_books_take_does_not_grow_with_what_was_forgotten(tmp_path: Path) -> None:
    disk = await opened(tmp_path, max_bytes=600 * RECORD, tenant_share=0.02)
    sizes = []
    for lap in range(6):
        for number in range(2000):
            tenant = b"%d" % (number % 50)
            await disk.write([record(2000 * lap + number, tenant)])
        sizes.append(num_held(disk._index))
    assert len(disk) <= 600
    assert max(sizes) <= 1.2 * sizes[0]
    disk.close()


def num_held(index: DiskIndex) -> int:
    """Everything in all of its books."""
    books: tuple[Sized, ...] = (index._blocks, index._names_of, index._tenant_names, index._tenant_bytes, index._shared)
    return sum(map(len, books)) + sum(
        len(inner) for book in (index._names_of, index._tenant_names) for inner in book.values()
    )


async def test_the_index_is_bounded_in_blocks_also_at_the_start(tmp_path: Path) -> None:
    disk = await opened(tmp_path, max_bytes=160 * RECORD)
    await written(disk, range(120))
    disk.close()
    disk = await opened(tmp_path, max_bytes=160 * RECORD, max_blocks=50)
    assert 0 < len(disk) <= 50
    await written(disk, range(200, 300))
    assert 0 < len(disk) <= 50
    assert there(disk, [299]) == [299], "the newest are kept"
    assert await read(disk, there(disk, range(300))) == len(disk)
    disk.close()


async def test_a_segment_that_cannot_be_read_is_dropped_and_the_others_serve_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    disk = await opened(tmp_path, max_bytes=160 * RECORD)
    await written(disk, range(30))
    disk.close()
    bad = sorted(files(tmp_path))[1]
    real, inode = os.pread, bad.stat().st_ino

    def broken(fd: int, length: int, offset: int) -> bytes:
        if os.fstat(fd).st_ino == inode and offset > 2 * RECORD:
            raise OSError(errno.EIO, "Input/output error")
        return real(fd, length, offset)

    failures = metrics.DISK_FAILURES.labels("scan")._value
    before = failures.get()
    monkeypatch.setattr(os, "pread", broken)
    disk = await opened(tmp_path, max_bytes=160 * RECORD)
    assert there(disk, range(30)) == [*range(10), *range(20, 30)]
    assert failures.get() == before + 1
    assert bad.name in caplog.text
    assert not bad.exists()
    await written(disk, range(40, 60))
    assert await read(disk, [0, 9, 20, 29, 40, 59]) == 6
    disk.close()


async def test_what_is_too_old_is_forgotten_also_when_nobody_asks(tmp_path: Path) -> None:
    now = 1000.0
    disk = DiskTier(tmp_path, DiskLimits(MIB), clock=lambda: now)
    await disk.open()
    for number in range(20):
        header, data = record(number)
        await disk.write([(replace(header, idle_seconds=60 * (number % 2)), data)])
    disk.sweep()
    assert len(disk) == 20
    now += 61
    disk.sweep()
    assert len(disk) == 10
    disk.close()


WRITE_FOREVER = """
import asyncio, sys
from pathlib import Path
from tests.services.kvstore.test_disk import opened, record

async def main():
    disk = await opened(Path(sys.argv[1]), max_bytes=64 << 20)
    for number in range(1_000_000):
        await disk.write([record(number)])
        print(number, flush=True)

asyncio.run(main())
"""


async def test_a_process_killed_in_mid_write_leaves_only_whole_blocks(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WRITE_FOREVER, str(tmp_path)]
    with psutil.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL) as process:
        for _ in range(50):
            last = int(await asyncio.to_thread(process.stdout.readline))
        process.kill()
    again = await opened(tmp_path, max_bytes=64 << 20)
    assert len(again) > last
    numbers = [*range(len(again))]
    assert await read(again, numbers) == len(numbers)
    again.close()


def test_a_header_that_was_not_written_whole_is_none() -> None:
    header = replace(record(5, b"tenant", 12.5)[0], idle_seconds=3600)
    packed = pack(header)
    assert unpack(packed) == header
    assert unpack(packed[:-1]) is None
    assert unpack(b"\0" * HEADER_BYTES) is None
