"""Where a bundle begins to pay: what is said of it, and which disk it is said of."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
from loadtest.weights import slow_disk as disks
from loadtest.weights.crossover import Speed, report
from loadtest.weights.slow_disk import NoThrottle, disk_of, slow_disk


def test_only_disks_that_are_slower_than_decoding_have_to_gain() -> None:
    fast, slow = Speed(3.0, 2.9, 2.5, 1.8), Speed(0.5, 0.5, 0.5, 0.7)
    assert report([slow, fast], 2.0).endswith("the bundle is faster: met")
    assert report([slow, fast], 3.0).endswith("the bundle is faster: MISSED")
    assert report([fast], 2.0).endswith("the bundle is faster: MISSED"), "nothing was shown"
    assert "| 0.50 | 0.50 | 0.50 | 0.70 | 1.40 |" in report([slow], 2.0)


def test_memory_is_no_disk() -> None:
    with pytest.raises(NoThrottle, match="lies on no disk"):
        disk_of(Path("/dev/shm"))
    with pytest.raises(NoThrottle, match="lies on no disk"), slow_disk(Path("/dev/shm"), 1 << 20):
        pass


def test_a_disk_that_cannot_be_slowed_down_leaves_no_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, text: str) -> int:
        raise OSError(errno.ENODEV, "No such device")

    monkeypatch.setattr(disks, "BLKIO", tmp_path)
    monkeypatch.setattr(disks, "disk_of", lambda directory: "7:0")
    monkeypatch.setattr(disks, "_own_group", lambda: tmp_path)
    monkeypatch.setattr(Path, "write_text", refuse)
    with pytest.raises(NoThrottle, match="No such device"), disks.slow_disk(tmp_path, 1 << 20):
        pass
    assert list(tmp_path.iterdir()) == []
