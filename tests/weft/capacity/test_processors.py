"""Cores whose time a container is granted, which are fewer than those that it may run on."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.weft.capacity.test_memory import V2, put, put_process

from weft.capacity.processors import granted_cores

V1 = "32 31 0:29 {seen} /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct"


def test_without_control_groups_nothing_is_granted_or_kept_back(tmp_path: Path) -> None:
    assert granted_cores(tmp_path) is None


@pytest.mark.parametrize(
    ("quota", "cores"), [("max 100000", None), ("800000 100000", 8), ("250000 100000", 2), ("50000 100000", 1)]
)
def test_a_quota_is_whole_cores_and_one_at_least(tmp_path: Path, quota: str, cores: int | None) -> None:
    put_process(tmp_path, "0::/", V2.format(seen="/"))
    put(tmp_path, "sys/fs/cgroup/cpu.max", quota)
    assert granted_cores(tmp_path) == cores


def test_the_tightest_of_all_groups_above_counts(tmp_path: Path) -> None:
    put_process(tmp_path, "0::/pod/weft", V2.format(seen="/"))
    put(tmp_path, "sys/fs/cgroup/pod/weft/cpu.max", "1600000 100000")
    put(tmp_path, "sys/fs/cgroup/pod/cpu.max", "400000 100000")
    assert granted_cores(tmp_path) == 4


@pytest.mark.parametrize(("quota", "cores"), [(-1, None), (300_000, 3)])
@pytest.mark.parametrize("seen", ["/", "/docker/abc"], ids=["the whole tree is mounted", "its own group is mounted"])
def test_version_1_is_read_as_well(tmp_path: Path, seen: str, quota: int, cores: int | None) -> None:
    put_process(tmp_path, "5:cpu,cpuacct:/docker/abc\n4:memory:/elsewhere\n0::/", V1.format(seen=seen))
    folder = "sys/fs/cgroup/cpu,cpuacct/" + ("docker/abc/" if seen == "/" else "")
    put(tmp_path, folder + "cpu.cfs_quota_us", quota)
    put(tmp_path, folder + "cpu.cfs_period_us", 100_000)
    assert granted_cores(tmp_path) == cores
