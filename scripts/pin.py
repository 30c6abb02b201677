"""Writes constraints.txt: the exact version of everything that Weft's extras pull in, as installed in this environment.

What some other machine needs and this one has not got keeps the pin that the file has. So does all else that is not
installed here: what those need in turn only they can say. What nothing needs any more goes where it is installed.
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
# this one, and the oldest Python there is support for
MACHINES: tuple[dict[str, str], ...] = ({}, {"python_version": "3.11", "python_full_version": "3.11.0"})


def wanted() -> list[Requirement]:
    """What pyproject.toml names, all extras together, and what an editable install needs."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    # the interpreter pins itself: with CUDA the version is torch's to choose
    extras = [lines for name, lines in project["optional-dependencies"].items() if name != "interpreter"]
    found = [Requirement(line) for lines in (BUILD, project["dependencies"], *extras) for line in lines]
    return [each for each in found if each.name != project["name"]]  # such as weft[engine]


def closure(roots: list[Requirement]) -> Iterator[tuple[str, str | None]]:
    """Name and installed version of each distribution that the roots need on any machine; None: not installed here."""
    waiting, seen = [*roots], set[tuple[str, str]]()
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        try:
            found = distribution(name)
        except PackageNotFoundError:
            yield name, None
            continue
        for extra in ("", *requirement.extras):
            if (name, extra) in seen:
                continue
            seen.add((name, extra))
            if not extra:
                # a local label such as +cpu names a build, not a version
                yield name, Version(found.version).public
            waiting += [needed for needed in map(Requirement, found.requires or ()) if is_wanted(needed, extra)]


def is_wanted(requirement: Requirement, extra: str) -> bool:
    """Does any machine that Weft runs on need it."""
    marker = requirement.marker
    return marker is None or any(marker.evaluate({**machine, "extra": extra}) for machine in MACHINES)


def is_installed(name: str) -> bool:
    """In this environment."""
    try:
        distribution(name)
    except PackageNotFoundError:
        return False
    return True


def main() -> None:
    """Rewrite the file; what is needed but not installed here keeps its pin."""
    old = dict(line.split("==") for line in CONSTRAINTS.read_text().splitlines() if "==" in line)
    pins = {name: version or old.get(name) for name, version in closure(wanted())}
    kept = [name for name in old if name not in pins and not is_installed(name)]
    pins |= {name: old[name] for name in kept}
    if kept:
        print(f"not installed here, and pinned as before for what may need them elsewhere: {', '.join(kept)}")
    lines = [f"{name}=={pins[name]}\n" for name in sorted(pins) if pins[name]]
    CONSTRAINTS.write_text(HEADER + "".join(lines))


if __name__ == "__main__":
    main()
