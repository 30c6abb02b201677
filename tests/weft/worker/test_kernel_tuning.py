"""Tiles are tried for speed alone: whatever goes wrong there, the worker starts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from weft.capacity.plan import FUSED_ROWS
from weft.worker.startup import tune_tiles
from weft_kernels.packed import tune_all
from weft_kernels.packed.linear import MAX_FUSED_ROWS


@pytest.mark.parametrize("error", [OSError("no room"), torch.OutOfMemoryError("no memory"), RuntimeError("no capture")])
def test_what_goes_wrong_is_said_and_no_reason_not_to_start(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*arguments: Any) -> int:
        raise error

    monkeypatch.setattr(tune_all, "tune_all", fail)
    decoder: Any = SimpleNamespace(packed=())
    tune_tiles(decoder, (1, 2), 1.0)
    assert str(error) in caplog.text


def test_the_plan_counts_what_is_unpacked_where_it_is() -> None:
    assert FUSED_ROWS == MAX_FUSED_ROWS
