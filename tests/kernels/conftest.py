"""Kernel tests: one thread, and no GPU tests without a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.kernels.device import ISAS
from weft_kernels.native import CHOICE


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Small tensors, and other processes on the same cores."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(params=ISAS or [""])
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every instruction set that this machine has."""
    if not request.param:
        pytest.skip("no build for this processor")
    monkeypatch.setenv(CHOICE, request.param)
    return str(request.param)


@pytest.fixture
def own_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Of tiles, with nothing in them; what others of this machine have tuned is not asked."""
    tuning = pytest.importorskip("weft_kernels.packed.tuning")
    monkeypatch.setattr(tuning, "directory", lambda: tmp_path)
    tuning.table_of.cache_clear()
    yield
    tuning.table_of.cache_clear()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """`gpu` tests run where a GPU is."""
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
