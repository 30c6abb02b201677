"""Threads that helped to load a model are gone when it is left to the engine, if waiting ones are to stay awake."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from weft_kernels.native import SPINS, native, release_threads
from weft_kernels.silu_mul import silu_mul

DEADLINE_SECONDS = 10.0


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def tasks() -> set[str]:
    return {path.name for path in Path("/proc/self/task").iterdir()}


def helpers_left(is_gone: bool) -> int:
    """Of a thread that has run a large kernel and released what helped it; waits for a helper to go if it should."""
    helpers: list[set[str]] = []

    def work() -> None:
        before = tasks()
        silu_mul(torch.ones(256, 2048))
        helpers.append(tasks() - before)
        release_threads()
        until = time.monotonic() + DEADLINE_SECONDS
        while is_gone and helpers[0] & tasks() and time.monotonic() < until:
            time.sleep(0.001)
        helpers.append(helpers[0] & tasks())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert len(helpers[0]) == 1
    return len(helpers[1])


@pytest.mark.usefixtures("two_threads")
def test_helpers_go_where_waiting_is_bounded_and_stay_where_it_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    if native() is None or not Path("/proc/self/task").exists():
        pytest.skip("no C++ kernels here, or no way to count threads")
    monkeypatch.setenv(SPINS, "100")
    assert helpers_left(is_gone=True) == 0
    monkeypatch.delenv(SPINS)
    assert helpers_left(is_gone=False) == 1
