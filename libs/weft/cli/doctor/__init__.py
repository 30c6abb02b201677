"""`weft doctor`: the checks by subject, what they look at, and what they find."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path


class Severity(StrEnum):
    """Severity of a finding, in ascending order."""

    OK = "ok"
    WARNING = "warning"
    FAILURE = "failure"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line. `advice` is what to do; empty where nothing has to be done."""

    check: str
    level: Severity
    says: str
    advice: str = ""


@dataclass(frozen=True, slots=True)
class Subject:
    """What a mesh on this machine would be made of: models by name, workers in all. `is_deep`: files are read to
    their end."""

    models: Mapping[str, Path]
    host: str = "127.0.0.1"
    port: int = 8000
    grpc_port: int = 9000
    num_workers: int = 2
    is_deep: bool = False
