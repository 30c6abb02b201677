"""The compose files as Compose would read them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
COMPOSE, OVERRIDE = ROOT / "compose.yaml", ROOT / "compose.tls.yaml"


def interpolate(value: Any) -> Any:
    """What Compose does with ${NAME:-default}, and ${NAME:?why} where NAME is the variable's value, without an .env."""
    if isinstance(value, dict):
        return {key: interpolate(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [interpolate(inner) for inner in value]
    return re.sub(r"\$\{(?:\w+:-([^}]*)|(\w+):\?[^}]*)\}", r"\1\2", value) if isinstance(value, str) else value


def all_services(path: Path = COMPOSE) -> dict[str, Any]:
    """Those of a file, whatever profile they are of."""
    found: dict[str, Any] = interpolate(yaml.safe_load(path.read_text()))["services"]
    return found


def plain_services() -> dict[str, Any]:
    """The services of a plain `docker compose up`."""
    return {name: service for name, service in all_services().items() if "profiles" not in service}


def is_weft(service: dict[str, Any]) -> bool:
    """Does it run one of Weft's own images."""
    return str(service["image"]).startswith("weft:")
