"""constraints.txt pins everything that pyproject.toml asks for, in versions that fit, for any machine.

All but Triton's interpreter, which pins itself: where torch has CUDA, its Triton is torch's choice.
"""

from __future__ import annotations

import tomllib
from importlib.metadata import version
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[2]
LINES = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
PINS = dict(line.split("==") for line in LINES)


def test_every_dependency_is_pinned_to_a_version_that_fits() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    for requirement in (Requirement(line) for group in groups for line in group):
        if requirement.name == project["name"]:
            assert requirement.extras <= project["optional-dependencies"].keys()
            continue
        exact = [each.version for each in requirement.specifier if each.operator == "=="]
        pin = PINS.get(canonicalize_name(requirement.name)) or exact[0]
        assert requirement.specifier.contains(pin), f"{requirement} but pinned to {pin}"


def test_what_is_not_installed_keeps_its_pin_and_what_it_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only what is installed says what it needs: greenlet is playwright's alone."""
    spec = spec_from_file_location("pin", ROOT / "scripts/pin.py")
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(pin := module_from_spec(spec))
    monkeypatch.setattr(pin, "CONSTRAINTS", file := tmp_path / "constraints.txt")
    monkeypatch.setattr(pin, "wanted", lambda: [Requirement("packaging"), Requirement("weft-none-such[x]")])
    file.write_text("# a header\nneeded-by-none-such==1\npackaging==0\npytest==1\nweft-none-such==2\n")
    pin.main()
    packaging, *rest = file.read_text().splitlines()[2:]
    assert file.read_text().splitlines()[1] == "needed-by-none-such==1"
    assert packaging == f"packaging=={Version(version('packaging')).public}"
    assert rest == ["weft-none-such==2"]
    assert "elsewhere: needed-by-none-such\n" in capsys.readouterr().out


def test_pins_name_versions_and_no_machines_builds() -> None:
    assert all(Version(pin).local is None for pin in PINS.values())


def test_pins_are_sorted_so_that_changes_read_well() -> None:
    names = list(PINS)
    assert names == sorted(names)
