"""Environment -> frozen dataclass: each field `foo_bar` is read from WEFT_FOO_BAR, loudly.

Fields may be str, int, float, bool, Path, a StrEnum, or any of these `| None`. One that is called a port is one.
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
# to listen on, never to be called by
WILDCARD_HOSTS = ("0.0.0.0", "::")
MAX_PORT = 65_535
# of torch or of readers: more than any machine has cores, fewer than a process may have threads
MAX_THREADS = 1024
# what messages between services hold
INT64 = range(-(2**63), 2**63)


class ConfigError(ValueError):
    """A setting that cannot be used; the message names the variable."""


class CpuKernels(StrEnum):
    """Those of a process. `weft_kernels.native` reads the variable by itself, but late: it stands among the settings of
    who loads kernels so that a wrong word is told like any other's."""

    AMX = "amx"
    AVX512_BF16 = "avx512_bf16"
    AVX512 = "avx512"
    AVX2 = "avx2"
    TORCH = "torch"


class CannotListen(OSError):
    """A port that is taken, or a host that is not this machine's; the message names both. Another start may mend it."""


def variable_name(field: str) -> str:
    """The environment variable of a field."""
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
    if kind is float and not math.isfinite(value):  # no comparison finds fault with NaN, and no wait is for ever
        raise ConfigError(f"{name}={raw!r}: expected a number")
    if kind is int and name.endswith("_PORT") and not 0 <= value <= MAX_PORT:  # gRPC takes the lower half of any number
        raise ConfigError(f"{name}={raw!r}: expected 0 to {MAX_PORT}")
    if kind is int and value not in INT64:
        raise ConfigError(f"{name}={raw!r}: expected a number of 64 bits")
    if name.endswith(("_ADDR", "_FROM")):
        check_addresses(name, raw)
    return value


def check_addresses(name: str, addresses: str) -> None:
    """Of peers, several by commas. Raises ConfigError for a port that there is not: gRPC would take the lower half of
    it, and ask whoever listens there."""
    for address in addresses.split(","):
        _, colon, port = address.strip().rpartition(":")
        if colon and port.isdecimal() and not 0 < float(port) <= MAX_PORT:
            raise ConfigError(f"{name}={address.strip()!r}: expected a port of 1 to {MAX_PORT}")


def read_models(text: str, name: str = "") -> dict[str, Path]:
    """Checkpoint directories by served name: WEFT_MODEL is one of them, or NAME=DIR,NAME=DIR. Raises ConfigError.

    One directory is called `name`, else as it is called itself; with a `name` it may have any characters.
    """
    if name or "=" not in text or os.path.isdir(text):  # which has no errors, as with a list too long for a path
        return {name or model_name(Path(text)): Path(text)}
    models: dict[str, Path] = {}
    for part in text.split(","):
        served, equals, directory = part.partition("=")
        if not (equals and served.strip() and directory.strip()) or served.strip() in models:
            raise ConfigError(f"WEFT_MODEL={text!r}: expected DIR, or NAME=DIR,NAME=DIR with different names")
        models[served.strip()] = Path(directory.strip())
    return models


def model_name(directory: Path) -> str:
    """Return the name under which a directory is served: its own, or that of the model in the Hub's cache.

    There it is `models--ORG--NAME/snapshots/COMMIT`.
    """
    path = directory.resolve()
    repository = path.parent.parent.name
    if path.parent.name != "snapshots" or not repository.startswith("models--"):
        return path.name
    return repository.rpartition("--")[2] or path.name


def describe(config: Any) -> str:
    """One line of key=value for the log; keys, tokens, passwords and the credentials of a URL are masked."""
    pairs = []
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        # a number or a file of that name tells nothing
        is_secret = isinstance(value, str) and field.name.endswith(("_key", "_keys", "_token", "_password"))
        pairs.append(f"{field.name}={'***' if is_secret else masked(str(value))}")
    return " ".join(pairs)


def masked(url: str) -> str:
    """Without its credentials, which clients of a Valkey take from behind a ? as well."""
    return re.sub(r"//.*@", "//***@", re.sub(r"([?&](?:username|password)=)[^&]*", r"\1***", url))


def is_loopback(host: str) -> bool:
    """Can this host be reached from this machine alone. A name other than localhost may mean any address. One of IPv6
    may stand in brackets, as compose wants it before a port."""
    try:
        return ipaddress.ip_address(host.removeprefix("[").removesuffix("]")).is_loopback
    except ValueError:
        return host == "localhost"
