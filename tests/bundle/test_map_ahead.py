"""What several threads read ahead is waited for before its file is closed, however the reading ends."""

from __future__ import annotations

import itertools
from collections.abc import Collection
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from tests.weft.weights.checkpoints import nothing
from weft.errors import BadCheckpoint
from weft.weights.storage import FileBlob, Scratch
from weft_bundle import convert
from weft_bundle import map_ahead as ahead_module
from weft_bundle.map_ahead import ParallelFileBlob, map_ahead
from weft_bundle.unpack import BundleFile


class Readers:
    """In place of a method that reads: the first one fails once another is at work, and that one goes on until it is
    waited for, or until the file is closed."""

    def __init__(self, error: BaseException, patch: pytest.MonkeyPatch) -> None:
        self._error = error
        self._number = itertools.count()
        self._is_another, self._may_end = Event(), Event()
        self.running: set[int] = set()
        self.running_when_closed: list[set[int]] = []
        real_close = FileBlob.close

        def close(blob: FileBlob) -> None:
            self.running_when_closed.append(set(self.running))
            self._may_end.set()
            real_close(blob)

        def wait(several: Collection[Future[Any]]) -> object:
            self._may_end.set()
            return futures.wait(several)

        patch.setattr(FileBlob, "close", close)
        patch.setattr(ahead_module, "wait", wait)

    def read(self, *_: object) -> None:
        if (number := next(self._number)) == 0:
            assert self._is_another.wait(30)
            raise self._error
        self.running.add(number)
        self._is_another.set()
        assert self._may_end.wait(30)
        self.running.remove(number)


ERRORS = [BadCheckpoint("a damaged chunk"), KeyboardInterrupt()]


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("tool", ["verify", "decompress"])
def test_a_bundle_is_closed_when_nobody_reads_it_any_more(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tool: str, error: BaseException
) -> None:
    rest = () if tool == "verify" else (tmp_path / "again",)
    with monkeypatch.context() as patch:
        patch.setattr(convert, "check_index", lambda files: None)
        patch.setattr(convert, "_original_names", lambda source, files: {file: file.stem for file in files})
        readers = Readers(error, patch)
        patch.setattr(BundleFile, "read_into", lambda *_: readers.read())
        with pytest.raises(type(error)):
            getattr(convert, tool)(bundle, *rest, 2, nothing)
    assert readers.running_when_closed == [set()]


@pytest.mark.parametrize("error", ERRORS)
def test_a_file_is_closed_when_nobody_reads_it_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    (tmp_path / "file").write_bytes(bytes(1000))
    with monkeypatch.context() as patch, ThreadPoolExecutor(2) as threads:
        readers = Readers(error, patch)
        patch.setattr(ahead_module, "PARALLEL_READ_BYTES", 100)
        patch.setattr(ParallelFileBlob, "_fill", readers.read)
        with pytest.raises(type(error)), closing(ParallelFileBlob(tmp_path / "file", threads)) as blob:
            blob.read(0, 1000, Scratch())
    assert readers.running_when_closed == [set()]


def test_results_come_in_order_and_no_more_is_done_than_is_asked_for() -> None:
    begun: list[int] = []

    def square(number: int) -> int:
        begun.append(number)
        return number**2

    with ThreadPoolExecutor(2) as threads:
        with closing(map_ahead(threads, square, [(number,) for number in range(100)], 7)) as squares:
            assert list(itertools.islice(squares, 5)) == [0, 1, 4, 9, 16]
        assert len(begun) <= 5 + 7
        assert list(map_ahead(threads, square, [(number,) for number in range(5)], 7)) == [0, 1, 4, 9, 16]
