"""Where the benchmark of the cache's tiers keeps its disk."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pytest
from loadtest.kv import tiers


@pytest.mark.parametrize("asked", [None, "elsewhere"])
def test_the_disk_tier_lies_beside_the_results_unless_asked_for_elsewhere(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, asked: str | None
) -> None:
    used: list[Path] = []

    async def measure(options: argparse.Namespace) -> dict[str, object]:
        used.append(options.disk)
        return {}

    monkeypatch.setattr(tiers, "measure", measure)
    words = ["--disk", str(tmp_path / asked)] if asked else []
    monkeypatch.setattr(sys, "argv", ["tiers", "--out", str(tmp_path / "out"), *words])
    tiers.main()
    assert used == [tmp_path / (asked or "out")]
