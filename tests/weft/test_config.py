"""WEFT_MODEL: one model, or several by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from weft.config import ConfigError, read_models


@pytest.mark.parametrize(
    ("text", "name", "expected"),
    [
        ("/m/nano", "", {"nano": "/m/nano"}),
        ("/m/nano/", "small", {"small": "/m/nano"}),
        ("/m/a=1,b", "odd", {"odd": "/m/a=1,b"}),
        ("small=/m/a, big=/m/b=2", "", {"small": "/m/a", "big": "/m/b=2"}),
        ("org/model=/m/a", "", {"org/model": "/m/a"}),
    ],
)
def test_models_are_read_by_name(text: str, name: str, expected: dict[str, str]) -> None:
    assert read_models(text, name) == {served: Path(path) for served, path in expected.items()}


@pytest.mark.parametrize("text", ["a=/m/a,/m/b", "a=/m/a,a=/m/b", "=/m/a", "a=", "a=/m/a,"])
def test_lists_that_name_no_model_are_refused_with_the_variable(text: str) -> None:
    with pytest.raises(ConfigError, match="WEFT_MODEL"):
        read_models(text)
