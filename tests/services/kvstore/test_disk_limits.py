"""What the disk tier gives up, and whose: its size, its age, each tenant's share, and the bounds of its books."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Sized
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.services.kvstore.disk_records import MIB, RECORD, files, opened, read, record, there, written
from weft_services.kvstore import disk as disk_module
from weft_services.kvstore.disk import DiskTier
from weft_services.kvstore.disk_index import DiskIndex, DiskLimits
from weft_services.kvstore.segment import until_closed


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
    disk = DiskTier(tmp_path, DiskLimits(MIB), clock=lambda: now, steady=lambda: now)
    await disk.open()
    header, data = record(1, stored_at=1000)
    assert await disk.write([(replace(header, idle_seconds=60), data), record(2, stored_at=1000)]) == 2
    for moment in (1050.0, 1110.0):
        now = moment
        assert there(disk, [1, 2]) == [1, 2]
    disk.close()
    again = DiskTier(tmp_path, DiskLimits(MIB), clock=lambda: now, steady=lambda: now)
    await again.open()
    assert there(again, [1, 2]) == [2]
    again.close()


async def test_a_clock_that_is_set_changes_neither_a_pause_nor_how_long_ago_a_use_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wall, now = 1000.0, 5.0
    disk = DiskTier(tmp_path, DiskLimits(MIB), clock=lambda: wall, steady=lambda: now)
    await disk.open()
    header, data = record(1, stored_at=wall)
    assert await disk.write([(replace(header, idle_seconds=60), data)]) == 1
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", lambda *_: 0)
        assert await disk.write([record(2)]) == 0
    for moment in (1e9, 0.0):
        wall = moment
        assert there(disk, [1]) == [1]
        assert await disk.write([record(2)]) == 0, "left alone for a while"
    now += disk_module.RETRY_SECONDS
    assert await disk.write([record(2)]) == 1
    now += 61
    assert there(disk, [1, 2]) == [2]
    disk.close()


async def test_what_is_let_go_is_removed_and_closed_on_threads_before_more_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, bool]] = []
    real = {name: getattr(os, name) for name in ("unlink", "close", "pwritev")}

    def noted(name: str, file: Any, *arguments: Any) -> Any:
        where = os.readlink(f"/proc/self/fd/{file}") if isinstance(file, int) else str(file)
        if ".kvlog" in where and where.startswith(str(tmp_path)):
            calls.append((name, threading.current_thread() is threading.main_thread()))
        return real[name](file, *arguments)

    def waited() -> None:
        until_closed()
        calls.append(("waited", False))

    disk = await opened(tmp_path, max_bytes=160 * RECORD)
    await written(disk, range(160))
    for name in real:
        monkeypatch.setattr(os, name, partial(noted, name))
    monkeypatch.setattr(disk_module, "until_closed", waited)
    await written(disk, [200])
    assert calls == [("unlink", False), ("close", False), ("waited", False), ("pwritev", False)]
    calls.clear()
    disk.close()
    del disk
    gc.collect()
    until_closed()
    assert calls == [("close", False)] * 16, "whatever ends later is closed as well"
    calls.clear()
    disk = await opened(tmp_path, max_bytes=160 * RECORD, max_blocks=50)
    await disk._space.in_writer(until_closed)  # behind the last of what it does there
    assert sorted(calls) == [("close", False)] * 11 + [("unlink", False)] * 11
    disk.close()


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


@pytest.mark.parametrize("num_records", [64, 160])
async def test_what_was_too_old_and_came_again_moves_and_goes_like_everything_else(
    tmp_path: Path, num_records: int
) -> None:
    """Of 4 records to a segment two do not count, and the others move; of 10 that is too little, and none is read."""
    now = 1000.0
    disk = DiskTier(tmp_path, DiskLimits(num_records * RECORD), clock=lambda: now, steady=lambda: now)
    await disk.open()
    for numbers in ([1, 2], [2]):
        now += 61
        disk.sweep()
        records = [record(number, stored_at=now) for number in numbers]
        assert await disk.write([(replace(header, idle_seconds=60), data) for header, data in records]) == len(numbers)
    assert there(disk, [1, 2]) == [2]
    for number in range(100, 400):
        assert await disk.write([record(number)]) == 1
        if num_records == 64:
            kept = there(disk, [2])
            assert await read(disk, kept) == len(kept), "it is right as long as it is there"
    assert sum(file.stat().st_size for file in files(tmp_path)) == disk.used_bytes <= num_records * RECORD
    disk.close()


async def test_a_large_disk_has_no_more_files_than_a_process_may_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_module, "DEFAULT_SEGMENT_BYTES", RECORD)
    disk = await opened(tmp_path, max_bytes=2048 * RECORD)
    await written(disk, range(2048))
    assert len(files(tmp_path)) <= 256
    assert there(disk, range(2048)) == [*range(2048)]
    disk.close()


async def test_what_is_too_old_is_forgotten_also_when_nobody_asks(tmp_path: Path) -> None:
    now = 1000.0
    disk = DiskTier(tmp_path, DiskLimits(MIB), steady=lambda: now)
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


async def test_what_moved_into_a_new_file_before_its_own_block_counts(tmp_path: Path) -> None:
    """Blocks of nearly three quarters of a file: what is left of another one moves there, and both are more than one
    file is to take."""
    max_bytes = 16 * RECORD * 100 // 74
    disk = await opened(tmp_path, max_bytes=max_bytes)
    for number in range(40):
        await written(disk, [number])
        assert sum(file.stat().st_size for file in files(tmp_path)) == disk.used_bytes <= max_bytes
        assert await read(disk, [number]) == 1
    disk.close()
