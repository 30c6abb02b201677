"""Writes constraints.txt: the exact version of everything that Weft's extras pull in, as installed in this environment.

Packages that cannot be installed beside one another keep the pin that the file has.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parent.parent
CONSTRAINTS = ROOT / "constraints.txt"
HEADER = "# Exact versions of all that Weft pulls in; written by `make pin`.\n"
BUILD = ["hatchling", "editables"]


def wanted() -> list[Requirement]:
    """What pyproject.toml names, all extras together, and what an editable install needs."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].values()
    return [Requirement(line) for lines in (BUILD, project["dependencies"], *extras) for line in lines]


def closure(roots: list[Requirement]) -> Iterator[tuple[str, str]]:
    """Name and version of each installed distribution that the roots need, each once."""
    waiting, seen = [*roots], set[tuple[str, str]]()
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        try:
            found = distribution(name)
        except PackageNotFoundError:
            continue
        for extra in ("", *requirement.extras):
            if (name, extra) in seen:
                continue
            seen.add((name, extra))
            if not extra:
                # a local label such as +cpu names a build, not a version
                yield name, Version(found.version).public
            for line in found.requires or ():
                needed = Requirement(line)
                if needed.marker is None or needed.marker.evaluate({"extra": extra}):
                    waiting.append(needed)


def main() -> None:
    """Rewrite the file."""
    kept = dict(line.split("==") for line in CONSTRAINTS.read_text().splitlines() if "==" in line)
    flavours = {name: version for name, version in kept.items() if name.startswith("mooncake-")}
    pins = {**flavours, **dict(closure(wanted()))}
    CONSTRAINTS.write_text(HEADER + "".join(f"{name}=={pins[name]}\n" for name in sorted(pins)))


if __name__ == "__main__":
    main()
