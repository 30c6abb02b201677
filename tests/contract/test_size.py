"""The engine stays something that one reads in an afternoon, and a new family something that one writes in one."""

from __future__ import annotations

from pathlib import Path

LIBS = Path(__file__).parents[2] / "libs/weft"
MAX_LINES = 4000
MAX_FAMILY_LINES = 80


def count_lines(path: Path) -> int:
    return len(path.read_text().splitlines())


def test_engine_and_models_are_less_than_4000_lines() -> None:
    files = [*(LIBS / "engine").rglob("*.py"), *(LIBS / "model").rglob("*.py")]
    assert len(files) > 30, "the code is somewhere else: look there"
    assert sum(map(count_lines, files)) < MAX_LINES


def test_a_llama_like_family_is_less_than_80_lines() -> None:
    for name in ("llama", "mistral", "qwen", "mixtral", "smollm3", "llama4", "deepseek"):
        assert count_lines(LIBS / f"model/{name}.py") < MAX_FAMILY_LINES
