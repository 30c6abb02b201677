"""The error for a missing trace."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from loadtest.fleet.__main__ import main as simulate
from loadtest.kv.replay import main as replay
from loadtest.traces import ORIGIN

PERFORMANCE = Path(__file__).parents[2] / "docs" / "performance.md"


def test_missing_trace_error_names_its_origin(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs: list[Callable[[], None]] = [lambda: simulate(["compare", "--trace", "nosuch.jsonl"]), replay]
    for run in runs:
        monkeypatch.setattr("sys.argv", ["replay", "nosuch.jsonl", "--out", "nowhere"])
        with pytest.raises(SystemExit):
            run()
        assert f"nosuch.jsonl: no such file; mooncake_conversation.jsonl is {ORIGIN}" in capsys.readouterr().err
    path, _, repository = ORIGIN.partition(" of ")
    assert f"`{path}` of [Mooncake's repository]({repository})" in " ".join(PERFORMANCE.read_text().split())
