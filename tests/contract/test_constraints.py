"""constraints.txt pins everything that pyproject.toml asks for, in versions that fit, for any machine.

All but Triton's interpreter, which pins itself: where torch has CUDA, its Triton is torch's choice.
"""

from __future__ import annotations

import tomllib
from pathlib import Path

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
        exact = [each.version for each in requirement.specifier if each.operator == "=="]
        pin = PINS.get(canonicalize_name(requirement.name)) or exact[0]
        assert requirement.specifier.contains(pin), f"{requirement} but pinned to {pin}"


def test_pins_name_versions_and_no_machines_builds() -> None:
    assert all(Version(pin).local is None for pin in PINS.values())


def test_pins_are_sorted_so_that_changes_read_well() -> None:
    names = list(PINS)
    assert names == sorted(names)
