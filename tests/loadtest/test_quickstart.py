"""Whose things the quickstart may find: a new user's."""

from __future__ import annotations

from pathlib import Path

import pytest
from loadtest import quickstart


def test_a_new_user_has_to_build_the_kernels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    told: dict[str, dict[str, str]] = {}

    class Serving:
        pid = 0

        def __init__(self, command: list[str], env: dict[str, str], **_: object) -> None:
            told["env"] = env
            raise SystemExit

    monkeypatch.setenv("VIRTUAL_ENV", "/of/this/checkout")
    monkeypatch.setattr("subprocess.run", lambda *_, **__: None)
    monkeypatch.setattr("subprocess.Popen", Serving)
    with pytest.raises(SystemExit):
        quickstart.run(tmp_path, tmp_path / "log")
    assert Path(told["env"]["WEFT_KERNEL_CACHE"]).is_relative_to(tmp_path)
    assert "VIRTUAL_ENV" not in told["env"]
