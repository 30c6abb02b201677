"""A disk tier whose disk fails or is full: what can still be read is, and nothing is thought to be where it is not."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.services.kvstore.disk_records import MIB, RECORD, files, opened, read, record, there, written
from weft import metrics
from weft.errors import ConfigError
from weft_services.kvstore import disk as disk_module
from weft_services.kvstore.__main__ import _lock_disk
from weft_services.kvstore.config import KvStoreConfig
from weft_services.kvstore.disk import DiskTier
from weft_services.kvstore.disk_index import DiskLimits
from weft_services.kvstore.segment import HEADER_BYTES


async def test_a_full_disk_takes_no_more_and_hurts_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    disk = DiskTier(tmp_path, DiskLimits(MIB), steady=lambda: now)
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
    disk = DiskTier(tmp_path, DiskLimits(64 * RECORD), steady=lambda: now)
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


@pytest.mark.parametrize("num_records", [30, 64])
@pytest.mark.parametrize("calls", [("pwritev",), ("unlink",), ("pwritev", "ftruncate", "unlink")])
async def test_a_disk_that_takes_no_changes_any_more_still_serves_what_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_records: int, calls: Sequence[str]
) -> None:
    def read_only(*_: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    now = 1000.0
    disk = DiskTier(tmp_path, DiskLimits(num_records * RECORD), steady=lambda: now)
    await disk.open()
    await written(disk, range(num_records))
    assert await read(disk, range(num_records)) == num_records
    for call in calls:
        monkeypatch.setattr(os, call, read_only)
    for number in range(200, 210):
        assert await disk.write([record(number)]) == 0
        now += 10
    assert await read(disk, range(num_records)) == num_records
    monkeypatch.undo()
    await written(disk, range(300, 304))
    assert sum(file.stat().st_size for file in files(tmp_path)) == disk.used_bytes <= num_records * RECORD
    assert len(there(disk, range(num_records))) >= num_records - 10
    disk.close()


async def test_a_block_that_cannot_be_read_does_not_keep_its_segment_from_making_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if offset in (0, HEADER_BYTES):
            raise OSError(errno.EIO, "Input/output error")
        return real(fd, buffers, offset)

    real = os.preadv
    disk = await opened(tmp_path, max_bytes=64 * RECORD)
    await written(disk, range(64))
    assert await read(disk, range(64)) == 64
    monkeypatch.setattr(os, "preadv", broken)
    await written(disk, range(100, 104))
    monkeypatch.undo()
    kept = there(disk, range(110))
    assert (0 in kept, kept[0], kept[-4:]) == (False, 1, [100, 101, 102, 103])
    assert await read(disk, kept) == len(kept)
    disk.close()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
async def test_a_disk_that_has_less_room_than_it_was_given_lets_the_oldest_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def full(*_: Any) -> int:
        raise OSError(code, "full")

    disk = await opened(tmp_path, max_bytes=160 * RECORD)
    await written(disk, range(30))
    monkeypatch.setattr(os, "pwritev", full)
    assert await disk.write([record(50)]) == 0
    assert there(disk, range(30)) == [*range(10, 30)]
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


@pytest.mark.parametrize("call", ["open", "ftruncate"])
@pytest.mark.parametrize("code", [errno.EMFILE, errno.EACCES, errno.EIO])
async def test_a_segment_that_cannot_be_opened_or_cut_stays_for_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, call: str, code: int
) -> None:
    disk = await opened(tmp_path, max_bytes=160 * RECORD)
    await written(disk, range(30))
    disk.close()
    bad = sorted(files(tmp_path))[-1]
    with bad.open("ab") as file:
        file.write(b"half of a record")
    content, real = bad.read_bytes(), getattr(os, call)

    def refuse(file: Any, *arguments: Any) -> Any:
        if (call, file) == ("open", bad) or call == "ftruncate":
            raise OSError(code, os.strerror(code))
        return real(file, *arguments)

    monkeypatch.setattr(os, call, refuse)
    disk = await opened(tmp_path, max_bytes=160 * RECORD)
    monkeypatch.undo()
    assert there(disk, range(30)) == [*range(20)]
    assert f"path={bad} action=kept for the next start" in caplog.text
    assert disk.used_bytes == 20 * RECORD + len(content)
    for number in range(100, 400):
        await written(disk, [number])
        assert sum(file.stat().st_size for file in files(tmp_path)) == disk.used_bytes <= 160 * RECORD
    assert bad.read_bytes() == content
    disk.close()
    disk = await opened(tmp_path, max_bytes=160 * RECORD)
    assert await read(disk, range(20, 30)) == 10
    disk.close()


async def test_a_disk_of_which_nothing_can_be_opened_begins_anew_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = await opened(tmp_path, max_bytes=160 * RECORD)
    await written(disk, range(30))
    disk.close()
    real = os.open

    def refuse(file: Any, *arguments: Any) -> int:
        if str(file).endswith(".kvlog"):
            raise OSError(errno.EMFILE, "Too many open files")
        return real(file, *arguments)

    monkeypatch.setattr(os, "open", refuse)
    disk = await opened(tmp_path, max_bytes=16 * RECORD)
    monkeypatch.undo()
    await written(disk, [50])
    assert there(disk, range(60)) == [50]
    disk.close()
    disk = await opened(tmp_path, max_bytes=160 * RECORD)
    assert await read(disk, [*range(30), 50]) == 31
    disk.close()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EROFS, errno.EMFILE, errno.ENFILE])
@pytest.mark.parametrize("what", ["lock", "flock", "stat"])
async def test_a_disk_that_cannot_be_taken_now_is_done_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, what: str, code: int
) -> None:
    real = os.open

    def refuse(*_: Any) -> Any:
        raise OSError(code, os.strerror(code))

    def refuse_lock(file: Any, *arguments: Any) -> int:
        return refuse() if str(file).endswith("lock") else real(file, *arguments)

    failures = metrics.DISK_FAILURES.labels("open")._value
    before = failures.get()
    places = {"lock": (os, "open", refuse_lock), "flock": (fcntl, "flock", refuse)}
    target, name, replacement = places.get(what, (disk_module, "sized_segments", refuse))
    with monkeypatch.context() as patch:
        patch.setattr(target, name, replacement)
        assert await _lock_disk(KvStoreConfig(disk_path=tmp_path)) is None
    assert failures.get() == before + 1
    assert [entry.levelname for entry in caplog.records] == ["ERROR"]
    assert str(tmp_path) in caplog.text
    (await opened(tmp_path)).close()


async def test_a_directory_that_is_another_ones_or_cannot_be_is_a_setting_to_correct(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = await opened(tmp_path)
    with pytest.raises(ConfigError, match=r"WEFT_DISK_PATH=.* in use by another"):
        await _lock_disk(KvStoreConfig(disk_path=tmp_path))
    disk.close()
    for code in (errno.EROFS, errno.EACCES, errno.ENOENT):

        def refuse(*_: Any, code: int = code) -> None:
            raise OSError(code, os.strerror(code))

        monkeypatch.setattr(os, "mkdir", refuse)
        with pytest.raises(ConfigError, match=os.strerror(code)):
            await _lock_disk(KvStoreConfig(disk_path=tmp_path / "other"))
