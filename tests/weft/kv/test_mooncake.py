"""The Transfer Engine over loopback TCP, and how pulls are split."""

from __future__ import annotations

import asyncio
import builtins
import ctypes
import gc
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.kv import mooncake
from weft.kv.mooncake import MooncakeTransport, MooncakeUnavailable
from weft.kv.transfer import CopyRange, Endpoint, KvSource, TransferFailed, coalesce
from weft.request import RequestKey

MIB = 1024 * 1024
BAD = 13 * 10_000
NAME = "libcudart.so.99"
# Mooncake's library names the runtime's, and does without a path to it
RUNTIME, LIBRARY = "int runtime(void) { return 7; }", "int runtime(void); int ask(void) { return runtime(); }"
LOAD = "import ctypes, sys; print(ctypes.CDLL(sys.argv[1]).ask())"
PREPARED = f"from weft.kv.mooncake import load_cuda_runtime; load_cuda_runtime(); {LOAD}"


class Side:
    """A transport and its registered memory."""

    def __init__(self, size: int, fill: int) -> None:
        self.memory = (ctypes.c_ubyte * size)()
        self.address = ctypes.addressof(self.memory)
        self.fill(fill)
        self.transport = MooncakeTransport("127.0.0.1")
        self.transport.register(self.address, size)

    def fill(self, value: int) -> None:
        ctypes.memset(self.memory, value, len(self.memory))

    def lender(self) -> KvSource:
        return KvSource(self.transport.endpoint(), "127.0.0.1:1", RequestKey("r"))


@pytest.fixture(scope="module")
def both() -> Iterator[tuple[Side, Side]]:
    """Start two sides of 8 MiB each; ending one takes a second."""
    lender, borrower = Side(8 * MIB, 7), Side(8 * MIB, 1)
    yield lender, borrower
    asyncio.run(borrower.transport.close())
    asyncio.run(lender.transport.close())


@pytest.fixture
def sides(both: tuple[Side, Side]) -> tuple[Side, Side]:
    """Fill the source with 7s and the target with 1s."""
    for side, fill in zip(both, (7, 1), strict=True):
        side.fill(fill)
    return both


async def test_a_closed_transport_leaves_nothing_for_the_garbage_collector() -> None:
    async def threads_of_one() -> int:
        lender, borrower = Side(MIB, 7), Side(MIB, 1)
        await borrower.transport.pull(lender.lender(), [CopyRange(lender.address, borrower.address, MIB)], 10)
        most = count_threads()
        await borrower.transport.close()
        await lender.transport.close()
        await lender.transport.close()  # once more changes nothing
        return most

    gc.disable()
    try:
        await threads_of_one()  # the library keeps some of its first one's
        before = await steady_count()
        most = await threads_of_one()
        assert most > before
        async with asyncio.timeout(10):
            while count_threads() != before:  # noqa: ASYNC110 - the kernel's
                await asyncio.sleep(0.01)
    finally:
        gc.enable()


async def steady_count() -> int:
    """Return the number of threads once it is stable."""
    before = -1
    while (now := count_threads()) != before:
        before = now
        await asyncio.sleep(0.1)
    return now


def count_threads() -> int:
    """Return this process' threads, including those of libraries."""
    return len(list(Path("/proc/self/task").iterdir()))


async def test_a_pull_copies_these_runs_and_nothing_else(sides: tuple[Side, Side]) -> None:
    lender, borrower = sides
    await borrower.transport.connect(lender.transport.endpoint())
    ctypes.memset(lender.address + 100, 9, 50)
    runs = [
        CopyRange(lender.address + 100, borrower.address + 300, 50),
        CopyRange(lender.address, borrower.address + MIB, 2 * MIB),
    ]
    await borrower.transport.pull(lender.lender(), runs, 10)
    copied = bytes(borrower.memory)
    assert copied[300:350] == b"\x09" * 50
    assert copied[MIB : MIB + 100] == b"\x07" * 100
    assert copied[:300] + copied[350:MIB] == b"\x01" * (MIB - 50)
    assert copied[3 * MIB :] == b"\x01" * (5 * MIB)


async def test_more_entries_than_the_library_queues_arrive_all(sides: tuple[Side, Side]) -> None:
    lender, borrower = sides
    # every other 512 bytes: nothing can be joined
    runs = [CopyRange(lender.address + at, borrower.address + at, 512) for at in range(0, 4 * MIB, 1024)]
    await borrower.transport.pull(lender.lender(), runs, 20)
    copied = bytes(borrower.memory)
    assert copied[: 4 * MIB] == (b"\x07" * 512 + b"\x01" * 512) * (4 * 1024)


async def test_a_peer_that_is_gone_fails_the_pull(sides: tuple[Side, Side]) -> None:
    _, borrower = sides
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        endpoint = Endpoint("mooncake", f"127.0.0.1:{unused.getsockname()[1]}", 4096)
        await borrower.transport.connect(endpoint)
        with pytest.raises(TransferFailed):
            await borrower.transport.pull(
                KvSource(endpoint, "", RequestKey("r")), [CopyRange(4096, borrower.address, 4096)], 10
            )


async def test_memory_that_is_not_lent_cannot_be_read(sides: tuple[Side, Side]) -> None:
    lender, borrower = sides
    with pytest.raises(TransferFailed):
        await borrower.transport.pull(lender.lender(), [CopyRange(4096, borrower.address, 4096)], 10)
    good = CopyRange(lender.address, borrower.address, 4096)
    await borrower.transport.pull(lender.lender(), [good], 10)
    assert bytes(borrower.memory[:4096]) == b"\x07" * 4096


async def test_no_batch_begins_after_the_deadline(sides: tuple[Side, Side]) -> None:
    lender, borrower = sides
    with pytest.raises(TransferFailed):
        await borrower.transport.pull(lender.lender(), [CopyRange(lender.address, borrower.address, 4096)], -1.0)
    assert bytes(borrower.memory[:4096]) == b"\x01" * 4096


@contextmanager
def without_mooncake(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Hide the library."""
    real_import = builtins.__import__

    def fail(name: str, *arguments: Any, **options: Any) -> Any:
        if name.startswith("mooncake"):
            raise ImportError("libibverbs.so.1: cannot open shared object file")
        return real_import(name, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(builtins, "__import__", fail)
        yield


def test_a_machine_without_the_library_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    with without_mooncake(monkeypatch), pytest.raises(MooncakeUnavailable, match="libibverbs"):
        MooncakeTransport("127.0.0.1")


def test_rdma_and_tcp_do_not_read_from_one_another(monkeypatch: pytest.MonkeyPatch) -> None:
    class Engine:
        def initialize(self, *arguments: str) -> int:
            return 0

        def get_rpc_port(self) -> int:
            return 1

    library: Any = ModuleType("mooncake.engine")
    library.TransferEngine = Engine
    monkeypatch.setitem(sys.modules, "mooncake.engine", library)
    tcp, rdma = (MooncakeTransport("127.0.0.1", protocol) for protocol in ("tcp", "rdma"))
    assert [way.reaches(peer.endpoint()) for way in (tcp, rdma) for peer in (tcp, rdma)] == [True, False, False, True]


class CountingEngine:
    """A Transfer Engine whose transfers end a few polls later; it records how many ran at once."""

    def __init__(self, patience: list[int]) -> None:
        self.patience = patience
        self.transfers: dict[int, CopyRange] = {}
        self.left: dict[int, int] = {}
        self.most, self.most_bytes = 0, 0

    def batch_transfer_async_read(self, segment: str, local: list[int], remote: list[int], size: list[int]) -> int:
        number = len(self.transfers) + 1
        self.transfers[number] = CopyRange(remote[0], local[0], size[0])
        self.left[number] = self.patience[number % len(self.patience)]
        self.most = max(self.most, len(self.left))
        self.most_bytes = max(self.most_bytes, sum(self.transfers[each].size_bytes for each in self.left))
        return number

    def transfer_check_status(self, number: int) -> int:
        if self.left[number]:
            self.left[number] -= 1
            return 0
        del self.left[number]  # asking once more would be a KeyError
        return -1 if self.transfers[number].remote_address == BAD else 1


@given(
    st.lists(st.integers(1, 5000), max_size=60),
    st.integers(1, 8),
    st.integers(64, 4096),
    st.lists(st.integers(0, 2), min_size=1),
)
def test_transfers_are_bounded_lose_nothing_and_are_all_over_at_the_end(
    sizes: list[int], max_in_flight: int, max_bytes: int, patience: list[int]
) -> None:
    runs = [CopyRange(i * 10_000, i * 20_000, size) for i, size in enumerate(sizes)]
    engine = CountingEngine(patience)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mooncake, "MAX_IN_FLIGHT", max_in_flight)
        patch.setattr(mooncake, "MAX_IN_FLIGHT_BYTES", max_bytes)
        patch.setattr(mooncake, "MAX_RUN_BYTES", max_bytes)
        patch.setattr(mooncake, "LONGEST_NAP_SECONDS", 0.0)
        pull = mooncake.Pull(engine, "peer", runs, time.monotonic() + 60)
        if any(run.remote_address == BAD for run in runs):
            with pytest.raises(TransferFailed):
                pull.run()
        else:
            pull.run()
            assert coalesce(list(engine.transfers.values())) == coalesce(runs)
    assert engine.left == {}
    assert engine.most <= max_in_flight
    assert engine.most_bytes <= max_bytes


def test_neighbours_are_joined_only_when_they_are_neighbours_on_both_sides() -> None:
    runs = [
        CopyRange(0, 100, 10),
        CopyRange(10, 110, 10),
        CopyRange(20, 130, 10),
        CopyRange(40, 140, 10),
        CopyRange(50, 150, 5),
    ]
    assert coalesce(runs) == [CopyRange(0, 100, 20), CopyRange(20, 130, 10), CopyRange(40, 140, 15)]


def build(source: str, out: Path, *options: str) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    command = ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(out), *options]
    subprocess.run(command, input=source, text=True, check=True)


def run(code: str, site: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python with this folder of packages."""
    path = os.pathsep.join([str(site), os.environ.get("PYTHONPATH", ""), *sys.path])
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False)


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
@pytest.mark.parametrize("package", ["cu13", "cuda_runtime"])
def test_what_needs_the_runtime_loads_where_pip_has_put_one(tmp_path: Path, package: str) -> None:
    site, library = tmp_path / "site-packages", tmp_path / "engine.so"
    runtime = site / "nvidia" / package / "lib" / NAME
    build(RUNTIME, runtime, f"-Wl,-soname,{NAME}")
    # linked as against the toolkit of whoever built the wheel
    build(LIBRARY, library, f"-L{runtime.parent}", f"-l:{NAME}")
    assert NAME in run(LOAD, site, str(library)).stderr
    assert run(PREPARED, site, str(library)).stdout == "7\n"


def test_without_a_runtime_or_with_one_that_does_not_load_nothing_is_said(tmp_path: Path) -> None:
    site = tmp_path / "site-packages"
    quiet = "from weft.kv.mooncake import load_cuda_runtime; load_cuda_runtime()"
    assert run(quiet, site).returncode == 0
    broken = site / "nvidia" / "cu13" / "lib" / "libcudart.so.13"
    broken.parent.mkdir(parents=True)
    broken.write_text("no library")
    ended = run(quiet, site)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


def test_what_is_missing_is_told_in_the_last_line(tmp_path: Path) -> None:
    (tmp_path / "mooncake").mkdir()
    (tmp_path / "mooncake" / "__init__.py").write_text("raise ImportError('libcuda.so.1: cannot open')")
    code = "import runpy; runpy.run_module('weft.kv.mooncake', run_name='__main__')"
    ended = run(code, tmp_path)
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1] == "ImportError: libcuda.so.1: cannot open"
