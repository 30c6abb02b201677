"""Reads settings from the environment into frozen dataclasses: field `foo_bar` comes from WEFT_FOO_BAR.

Fields may be str, int, float, bool, Path, a StrEnum, or any of these `| None`. Fields named `*_port` must hold a port.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import math
import os
import re
import types
import typing
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar

ConfigT = TypeVar("ConfigT")
# Hosts to listen on; peers cannot call them.
WILDCARD_HOSTS = ("0.0.0.0", "::")
MAX_PORT = 65_535
# Limit for torch and reader threads: more than any machine has cores, fewer than a process may have threads.
MAX_THREADS = 1024
# Integer range of the messages between services.
INT64 = range(-(2**63), 2**63)


class ConfigError(ValueError):
    """An unusable setting; the message names the variable."""


class CpuKernels(StrEnum):
    """CPU kernel variants. `weft_kernels.native` reads the variable itself, but late.

    Declared here so that a typo fails at startup instead of at first use.
    """

    AMX = "amx"
    AVX512_BF16 = "avx512_bf16"
    AVX512 = "avx512"
    AVX2 = "avx2"
    TORCH = "torch"


class BindError(OSError):
    """The port is taken, or the host is not this machine's; the message names both. A later start may succeed."""


def variable_name(field: str) -> str:
    """Return the environment variable of a field."""
    return f"WEFT_{field.upper()}"


def read_config(cls: type[ConfigT], environ: Mapping[str, str] = os.environ) -> ConfigT:
    """Fill the dataclass from the environment. Raises ConfigError naming the variable."""
    assert dataclasses.is_dataclass(cls)
    hints = typing.get_type_hints(cls)
    values: dict[str, Any] = {}
    for field in dataclasses.fields(cls):
        name = variable_name(field.name)
        raw = environ.get(name, "")
        if raw:
            values[field.name] = _parse(name, raw, hints[field.name])
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise ConfigError(f"{name} is not set")
    return cls(**values)


def _parse(name: str, raw: str, kind: Any) -> Any:
    if isinstance(kind, types.UnionType):
        kind = next(arm for arm in kind.__args__ if arm is not type(None))
    if kind is bool:
        if raw.lower() not in ("0", "1", "true", "false"):
            raise ConfigError(f"{name}={raw!r}: expected 0, 1, true or false")
        return raw.lower() in ("1", "true")
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        try:
            return kind(raw)
        except ValueError:
            raise ConfigError(f"{name}={raw!r}: expected one of {', '.join(kind)}") from None
    if kind in (str, int, float, Path):
        return _parse_plain(name, raw, kind)
    raise TypeError(f"{name}: fields of type {kind} are not supported")


def _parse_plain(name: str, raw: str, kind: Any) -> Any:
    try:
        value = kind(raw)
    except ValueError:
        raise ConfigError(f"{name}={raw!r}: expected {kind.__name__}") from None
    if kind is float and not math.isfinite(value):  # NaN passes every comparison, and a wait must end.
        raise ConfigError(f"{name}={raw!r}: expected a finite number")
    # gRPC would use the lower 16 bits of a larger number.
    if kind is int and name.endswith("_PORT") and not 0 <= value <= MAX_PORT:
        raise ConfigError(f"{name}={raw!r}: expected 0 to {MAX_PORT}")
    if kind is int and value not in INT64:
        raise ConfigError(f"{name}={raw!r}: expected a 64-bit integer")
    if name.endswith(("_ADDR", "_FROM")):
        check_addresses(name, raw)
    return value


def check_addresses(name: str, addresses: str) -> None:
    """Check the ports of comma-separated peer addresses. Raises ConfigError.

    gRPC would use the lower 16 bits of a larger number and call another service there.
    """
    for address in addresses.split(","):
        _, colon, port = address.strip().rpartition(":")
        if colon and port.isdecimal() and not 0 < float(port) <= MAX_PORT:
            raise ConfigError(f"{name}={address.strip()!r}: expected a port of 1 to {MAX_PORT}")


def read_models(text: str, name: str = "") -> dict[str, Path]:
    """Return checkpoint directories by served name. WEFT_MODEL is one directory, or NAME=DIR,NAME=DIR.

    A single directory is served as `name`, or under its own name; with a `name` its path may hold any characters.
    Raises ConfigError.
    """
    if name or "=" not in text or os.path.isdir(text):  # isdir never raises, even for a list too long for a path
        return {name or model_name(Path(text)): Path(text)}
    models: dict[str, Path] = {}
    for part in text.split(","):
        served, equals, directory = part.partition("=")
        if not (equals and served.strip() and directory.strip()) or served.strip() in models:
            raise ConfigError(f"WEFT_MODEL={text!r}: expected DIR, or NAME=DIR,NAME=DIR with different names")
        models[served.strip()] = Path(directory.strip())
    return models


def model_name(directory: Path) -> str:
    """Return the name under which a directory is served: its own, or the model's name in a Hugging Face cache.

    A cache directory is `models--ORG--NAME/snapshots/COMMIT`.
    """
    path = directory.resolve()
    repository = path.parent.parent.name
    if path.parent.name != "snapshots" or not repository.startswith("models--"):
        return path.name
    return repository.rpartition("--")[2] or path.name


def format_config(config: Any) -> str:
    """Format a config as one line of key=value. Masks keys, tokens, passwords and credentials in URLs."""
    pairs = []
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        # A number or a path with such a name is not secret.
        is_secret = isinstance(value, str) and field.name.endswith(("_key", "_keys", "_token", "_password"))
        pairs.append(f"{field.name}={'***' if is_secret else redact_credentials(str(value))}")
    return " ".join(pairs)


def redact_credentials(url: str) -> str:
    """Replace the credentials of a URL by ***, also those in its query, which Valkey clients accept."""
    return re.sub(r"//.*@", "//***@", re.sub(r"([?&](?:username|password)=)[^&]*", r"\1***", url))


def is_loopback(host: str) -> bool:
    """True if only this machine can reach `host`. Any name other than localhost counts as remote.

    IPv6 addresses may stand in brackets, as compose requires before a port.
    """
    try:
        return ipaddress.ip_address(host.removeprefix("[").removesuffix("]")).is_loopback
    except ValueError:
        return host == "localhost"
