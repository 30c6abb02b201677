"""The disk tier: what it keeps over a restart, what it drops, and that nothing is ever half."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.services.kvstore.disk_records import (
    MODEL,
    RECORD,
    SIZE,
    damage,
    files,
    key,
    opened,
    read,
    record,
    there,
    written,
)
from weft import metrics
from weft_services.kvstore import segment
from weft_services.kvstore.disk import DiskTier
from weft_services.kvstore.disk_index import DiskLimits
from weft_services.kvstore.segment import HEADER_BYTES, MAGIC, RecordHeader, pack, segment_paths, unpack


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


async def test_what_is_found_again_is_served_before_all_is_and_what_is_new_comes_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = await opened(tmp_path, max_bytes=160 * RECORD)
    await written(disk, range(30))
    disk.close()
    gate, real = threading.Event(), segment.Segment.records

    def gated(self: segment.Segment) -> Iterator[tuple[int, RecordHeader]]:
        assert self.number == 0 or gate.wait(20)
        return real(self)

    monkeypatch.setattr(segment.Segment, "records", gated)
    again = DiskTier(tmp_path, DiskLimits(160 * RECORD))
    await again.lock()
    loading = asyncio.create_task(again.load())
    async with asyncio.timeout(20):
        while not len(again):  # noqa: ASYNC110 (a thread brings it about)
            await asyncio.sleep(0.001)
    writing = asyncio.create_task(written(again, [50]))
    assert await read(again, [0, 9]) == 2
    assert there(again, [10, 50]) == []
    gate.set()
    await asyncio.gather(loading, writing)
    assert there(again, range(60)) == [*range(30), 50]
    again.close()
    assert len(segment_paths(tmp_path)) == 4
    last = await opened(tmp_path, max_bytes=160 * RECORD)
    assert await read(last, [*range(30), 50]) == 31
    last.close()


async def test_what_is_written_while_older_files_are_read_is_newer_than_what_they_hold(tmp_path: Path) -> None:
    disk = await opened(tmp_path, max_bytes=160 * RECORD)
    await written(disk, range(30))
    disk.close()
    again = DiskTier(tmp_path, DiskLimits(160 * RECORD))
    await again.lock()
    assert again.used_bytes == 30 * RECORD
    loading = asyncio.create_task(again.load())
    await asyncio.sleep(0)
    assert await again.write([record(29, stored_at=7.0), record(50)]) == 2
    assert again._space.to_load, "it waits for one file, not for all"
    await loading
    assert there(again, range(60)) == [*range(30), 50]
    assert [header.stored_at for number in (28, 29) if (header := again.find(MODEL, key(number)))] == [0.0, 7.0]
    again.close()
    last = await opened(tmp_path, max_bytes=160 * RECORD)
    assert await read(last, [*range(30), 50]) == 31
    last.close()


async def test_a_tenant_that_writes_while_older_files_are_read_loses_the_older_of_its_blocks(tmp_path: Path) -> None:
    disk = await opened(tmp_path, max_bytes=160 * RECORD)
    assert await disk.write([record(number, b"greedy") for number in range(60)]) == 60
    disk.close()
    again = DiskTier(tmp_path, DiskLimits(160 * RECORD, tenant_share=0.1))
    await again.lock()
    loading = asyncio.create_task(again.load())
    await asyncio.sleep(0)
    assert await again.write([record(number, b"greedy") for number in (100, 101)]) == 2
    await loading
    assert there(again, range(110)) == [*range(46, 60), 100, 101]
    again.close()


@pytest.mark.parametrize("max_records", [160, 32])
async def test_a_full_disk_stays_within_its_size_while_it_is_read(tmp_path: Path, max_records: int) -> None:
    disk = await opened(tmp_path, max_bytes=160 * RECORD)
    await written(disk, range(160))
    disk.close()
    again = DiskTier(tmp_path, DiskLimits(max_records * RECORD))
    await again.lock()
    loading = asyncio.create_task(again.load())
    for number in range(200, 230):
        await asyncio.sleep(0)
        await written(again, [number])
    await loading
    assert sum(file.stat().st_size for file in files(tmp_path)) == again.used_bytes <= max_records * RECORD
    assert there(again, range(225, 230)) == [*range(225, 230)]
    again.close()


async def test_two_who_write_at_once_write_one_after_the_other(tmp_path: Path) -> None:
    disk = await opened(tmp_path)
    await asyncio.gather(written(disk, range(4)), written(disk, range(4, 8)), written(disk, range(8, 12)))
    assert len(files(tmp_path)) == 1
    assert disk.used_bytes == 12 * RECORD
    assert [number for number in range(12) if await read(disk, [number]) == 1] == [*range(12)]
    disk.close()


async def test_bytes_that_came_damaged_are_not_written(tmp_path: Path) -> None:
    disk = await opened(tmp_path)
    header, data = record(1)
    lost = metrics.TIER_MOVES.labels("lost")._value
    before = lost.get()
    assert await disk.write([record(0), (header, memoryview(bytes(SIZE))), record(2)]) == 2
    assert (there(disk, range(3)), disk.used_bytes, lost.get()) == ([0, 2], 2 * RECORD, before + 1)
    assert await disk.write([(header, data)]) == 1
    disk.close()


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


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
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
    assert {*range(5)} - {place // RECORD} <= {*there(disk, range(5))}, "what lies before and behind the damage is kept"
    disk.close()


@pytest.mark.parametrize("search_bytes", [9, RECORD // 3, 1 << 20])
async def test_the_records_behind_damaged_headers_are_found_and_what_lies_between_counts_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, search_bytes: int
) -> None:
    monkeypatch.setattr(segment, "SEARCH_BYTES", search_bytes)
    disk = await opened(tmp_path)
    await written(disk, range(3))
    misleading = (MAGIC * (SIZE // len(MAGIC)))[:SIZE]
    header = replace(record(3)[0], checksum=xxhash.xxh3_64_intdigest(misleading))
    assert await disk.write([(header, memoryview(misleading))]) == 1
    await written(disk, range(4, 8))
    disk.close()
    for number in (0, 2, 3, 5):
        damage(tmp_path, number * RECORD, 1)
    again = await opened(tmp_path)
    assert there(again, range(8)) == [1, 4, 6, 7]
    assert [await read(again, [number]) for number in (1, 4, 6, 7)] == [1] * 4
    assert again.used_bytes == 8 * RECORD
    assert again._index.live_bytes(again._space.segments[0]) == 4 * RECORD
    await written(again, [9])
    again.close()
    damage(tmp_path, 9 * RECORD - 1, 1)
    damage(tmp_path, 7 * RECORD, 1)
    last = await opened(tmp_path)
    assert there(last, range(10)) == [1, 4, 6]
    assert last.used_bytes == 7 * RECORD, "nothing behind is whole"
    last.close()


WRITE_FOREVER = """
import asyncio, sys
from pathlib import Path
from tests.services.kvstore.disk_records import opened, record

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


@pytest.mark.parametrize("tenant", [b"", b"tenant", b"a tenant", b"ends in\0"])
def test_a_header_comes_back_as_it_was_or_not_at_all(tenant: bytes) -> None:
    header = replace(record(5, tenant, 12.5)[0], idle_seconds=3600)
    packed = pack(header)
    assert unpack(packed) == header
    assert unpack(packed[:-1]) is None
    assert unpack(b"\0" * HEADER_BYTES) is None
