"""WEFT_MODEL: one model, or several by name."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from weft.config import ConfigError, read_config, read_models


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


def test_a_directory_may_have_a_sign_of_equality_in_its_path(tmp_path: Path) -> None:
    """As tools that keep runs apart name them."""
    (model := tmp_path / "run=3" / "model").mkdir(parents=True)
    assert read_models(str(model)) == {"model": model}
    assert read_models(f"mine={model}") == {"mine": model}


def test_a_list_may_be_longer_than_a_path() -> None:
    places = {f"model-{number}": Path("/models") / f"snapshot-{number}" for number in range(300)}
    assert read_models(",".join(f"{served}={path}" for served, path in places.items())) == places


@pytest.mark.parametrize("text", ["a=/m/a,/m/b", "a=/m/a,a=/m/b", "=/m/a", "a=", "a=/m/a,"])
def test_lists_that_name_no_model_are_refused_with_the_variable(text: str) -> None:
    with pytest.raises(ConfigError, match="WEFT_MODEL"):
        read_models(text)


@dataclass(frozen=True)
class Patience:
    """Settings of a service."""

    wait_seconds: float = 1.0


@pytest.mark.parametrize("raw", ["nan", "inf", "-inf", "soon"])
def test_a_number_of_no_size_is_refused_by_the_name_of_its_variable(raw: str) -> None:
    """A service would compare with it, and find all well."""
    with pytest.raises(ConfigError, match=f"WEFT_WAIT_SECONDS='{raw}'"):
        read_config(Patience, {"WEFT_WAIT_SECONDS": raw})
    assert read_config(Patience, {"WEFT_WAIT_SECONDS": "2.5"}) == Patience(2.5)
