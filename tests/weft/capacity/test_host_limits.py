"""Memory and cores left to this process by the machine and by the tightest of its control groups."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from weft.capacity.host_limits import available_bytes, granted_cores

GIB = 1 << 30
NO_LIMIT = 9223372036854771712
V2 = "31 23 0:28 {seen} /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate"
V1 = "35 31 0:32 {seen} /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory"
CPU = "32 31 0:29 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu"
CPU_V1 = "32 31 0:29 {seen} /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct"


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """256 GiB, 200 of them available."""
    put(tmp_path, "proc/meminfo", f"MemTotal: {256 << 20} kB\nMemAvailable: {200 << 20} kB\nHugePages_Total: 0")
    return tmp_path


def put(root: Path, name: str, text: object) -> None:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(f"{text}\n")


def put_process(root: Path, groups: str, mounts: str) -> None:
    put(root, "proc/self/cgroup", groups)
    put(root, "proc/self/mountinfo", "22 1 8:1 / / rw,relatime - ext4 /dev/root rw\n" + mounts)


def put_v2(root: Path, group: str, limit: object, used: int, cache: int = 0) -> None:
    folder = f"sys/fs/cgroup/{group}/"
    put(root, folder + "memory.max", limit)
    put(root, folder + "memory.high", "max")
    put(root, folder + "memory.current", used)
    put(root, folder + "memory.stat", f"anon 7\nactive_file 9\ninactive_file {cache}")


def put_v1(root: Path, group: str, limit: int, used: int, cache: int = 0) -> None:
    folder = f"sys/fs/cgroup/memory/{group}/"
    put(root, folder + "memory.limit_in_bytes", limit)
    put(root, folder + "memory.usage_in_bytes", used)
    put(root, folder + "memory.stat", f"inactive_file 1\ntotal_inactive_file {cache}")


def test_here_it_is_a_part_of_the_machines() -> None:
    assert 2**20 < available_bytes() < os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def test_without_control_groups_it_is_what_linux_says(machine: Path) -> None:
    assert available_bytes(machine) == 200 * GIB


def test_without_linux_it_is_half_of_all(tmp_path: Path) -> None:
    assert available_bytes(tmp_path) == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def test_a_container_has_what_is_left_of_its_limit_and_the_cache_that_nobody_uses(machine: Path) -> None:
    put_process(machine, "0::/", V2.format(seen="/"))
    put_v2(machine, "", 4 * GIB, used=3 * GIB, cache=GIB // 2)
    assert available_bytes(machine) == GIB + GIB // 2


def test_a_group_beyond_its_limit_has_nothing_left(machine: Path) -> None:
    put_process(machine, "0::/", V2.format(seen="/"))
    put_v2(machine, "", GIB, used=2 * GIB)
    assert available_bytes(machine) == 0


def test_the_tightest_of_all_groups_above_counts(machine: Path) -> None:
    put_process(machine, "0::/kubepods.slice/pod7.slice/weft.scope", V2.format(seen="/"))
    put_v2(machine, "kubepods.slice/pod7.slice/weft.scope", "max", used=GIB)
    put_v2(machine, "kubepods.slice/pod7.slice", 16 * GIB, used=10 * GIB)
    put_v2(machine, "kubepods.slice", 64 * GIB, used=20 * GIB)
    assert available_bytes(machine) == 6 * GIB
    put_v2(machine, "kubepods.slice", 64 * GIB, used=60 * GIB)
    assert available_bytes(machine) == 4 * GIB
    put(machine, "sys/fs/cgroup/kubepods.slice/pod7.slice/weft.scope/memory.high", 3 * GIB)
    assert available_bytes(machine) == 2 * GIB


@pytest.mark.parametrize("seen", ["/", "/docker/abc"], ids=["the whole tree is mounted", "its own group is mounted"])
def test_version_1_is_read_as_well(machine: Path, seen: str) -> None:
    groups = "5:cpu:/elsewhere\n4:memory:/docker/abc\n0::/"
    put_process(machine, groups, f"{CPU}\n{V1.format(seen=seen)}\n{V2.format(seen='/')}")
    put_v1(machine, "docker/abc" if seen == "/" else "", 8 * GIB, used=3 * GIB, cache=GIB)
    if seen == "/":
        put_v1(machine, "", NO_LIMIT, used=20 * GIB)
        put_v1(machine, "docker", NO_LIMIT, used=20 * GIB)
    assert available_bytes(machine) == 6 * GIB


def test_a_process_outside_of_what_it_sees_is_bounded_by_what_it_sees(machine: Path) -> None:
    put_process(machine, "0::/../other", V2.format(seen="/"))
    put_v2(machine, "", 4 * GIB, used=GIB)
    assert available_bytes(machine) == 3 * GIB


def test_without_control_groups_nothing_is_granted_or_kept_back(tmp_path: Path) -> None:
    assert granted_cores(tmp_path) is None


@pytest.mark.parametrize(
    ("quota", "cores"), [("max 100000", None), ("800000 100000", 8), ("250000 100000", 2), ("50000 100000", 1)]
)
def test_a_quota_is_whole_cores_and_one_at_least(tmp_path: Path, quota: str, cores: int | None) -> None:
    put_process(tmp_path, "0::/", V2.format(seen="/"))
    put(tmp_path, "sys/fs/cgroup/cpu.max", quota)
    assert granted_cores(tmp_path) == cores


def test_granted_cores_follow_the_tightest_group(tmp_path: Path) -> None:
    put_process(tmp_path, "0::/pod/weft", V2.format(seen="/"))
    put(tmp_path, "sys/fs/cgroup/pod/weft/cpu.max", "1600000 100000")
    put(tmp_path, "sys/fs/cgroup/pod/cpu.max", "400000 100000")
    assert granted_cores(tmp_path) == 4


@pytest.mark.parametrize(("quota", "cores"), [(-1, None), (300_000, 3)])
@pytest.mark.parametrize("seen", ["/", "/docker/abc"], ids=["the whole tree is mounted", "its own group is mounted"])
def test_granted_cores_read_version_1(tmp_path: Path, seen: str, quota: int, cores: int | None) -> None:
    put_process(tmp_path, "5:cpu,cpuacct:/docker/abc\n4:memory:/elsewhere\n0::/", CPU_V1.format(seen=seen))
    folder = "sys/fs/cgroup/cpu,cpuacct/" + ("docker/abc/" if seen == "/" else "")
    put(tmp_path, folder + "cpu.cfs_quota_us", quota)
    put(tmp_path, folder + "cpu.cfs_period_us", 100_000)
    assert granted_cores(tmp_path) == cores
