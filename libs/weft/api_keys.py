"""API keys: how one is made, what is kept of it (a digest, never the key), and what it may do. Knows no storage."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

PREFIX = "sk-weft-"
SECRET_BYTES = 32
MAX_KEY_CHARS = 256
# as clients count: lower is sooner
MOST_URGENT, LEAST_URGENT = -10, 10
# where a fleet's keys lie: a hash of entries by name, and a number that grows with every change
VALKEY_SCHEMES = ("redis://", "rediss://", "unix://")
VALKEY_KEYS, VALKEY_VERSION = "weft:{keys}:entries", "weft:{keys}:version"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", re.ASCII)
_DIGEST = re.compile(r"[0-9a-f]{64}", re.ASCII)


class BadKeys(ValueError):
    """A list of keys that cannot be read; the message names the entry and the field."""


@dataclass(frozen=True, slots=True)
class Key:
    """One entry. Without `models` it may use all; `priority` is the most urgent it may claim; 0 is no limit.

    Keys of one tenant share a cache and a turn in the scheduler's waiting room; others never do.
    """

    name: str
    digest: str
    tenant: str = ""
    models: tuple[str, ...] = ()
    priority: int = 0
    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    operator: bool = False

    def __post_init__(self) -> None:
        for field, value in (("name", self.name), ("tenant", self.tenant or self.name)):
            if not NAME.fullmatch(value):
                raise BadKeys(f"{field}: {value!r}: expected up to 64 of A-Z a-z 0-9 . _ - and no sign at its start")
        if not _DIGEST.fullmatch(self.digest):
            raise BadKeys("digest: expected the SHA-256 of the key, 64 hexadecimal digits in lower case")
        if not MOST_URGENT <= self.priority <= LEAST_URGENT:
            raise BadKeys(f"priority: {self.priority}: expected {MOST_URGENT} to {LEAST_URGENT}")
        for field in ("requests_per_minute", "tokens_per_minute"):
            if not 0 <= getattr(self, field) <= 10**9:
                raise BadKeys(f"{field}: {getattr(self, field)}: expected 0 to 10^9")

    @property
    def owner(self) -> str:
        """Its tenant; a key without one is its own."""
        return self.tenant or self.name

    @property
    def cache_salt(self) -> bytes:
        """Goes into the keys of KV blocks."""
        return hashlib.blake2b(self.owner.encode(), digest_size=16, person=b"weft-cache-salt").digest()

    def may_use(self, model: str) -> bool:
        """Is this one of its models."""
        return not self.models or model in self.models


def make_secret() -> str:
    """A new key, to be shown once."""
    return PREFIX + secrets.token_urlsafe(SECRET_BYTES)


def digest_of(secret: str) -> str:
    """What is kept of a key. It has 256 random bits, so a plain hash cannot be searched."""
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).hexdigest()


def dump_keys(keys: Iterable[Key]) -> str:
    """As a keys file; fields that say nothing are left out."""
    return json.dumps({"keys": [_fields(key) for key in keys]}, indent=2) + "\n"


def dump_key(key: Key) -> str:
    """One entry on one line."""
    return json.dumps(_fields(key))


def load_keys(text: str | bytes) -> dict[str, Key]:
    """Keys by digest. Raises BadKeys."""
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadKeys(f"not JSON: {error}") from error
    entries = parsed.get("keys") if isinstance(parsed, dict) else None
    if not isinstance(entries, list):
        raise BadKeys('expected {"keys": [...]}')
    return by_digest(_parse(f"keys.{position}", entry) for position, entry in enumerate(entries))


def load_key(text: str | bytes) -> Key:
    """One entry. Raises BadKeys."""
    try:
        return _parse("key", json.loads(text))
    except (ValueError, RecursionError) as error:
        raise error if isinstance(error, BadKeys) else BadKeys(f"not JSON: {error}") from error


def by_digest(keys: Iterable[Key]) -> dict[str, Key]:
    """As the gateway looks them up. Raises BadKeys where two have one name or one digest."""
    found: dict[str, Key] = {}
    names: set[str] = set()
    for key in keys:
        if key.name in names or key.digest in found:
            raise BadKeys(f"{key.name}: there is another key with this name or digest")
        names.add(key.name)
        found[key.digest] = key
    return found


def _parse(place: str, entry: Any) -> Key:
    if not isinstance(entry, Mapping):
        raise BadKeys(f"{place}: expected an object")
    kinds = {field.name: field for field in dataclasses.fields(Key)}
    values: dict[str, Any] = {}
    for name, value in entry.items():
        if name not in kinds:
            raise BadKeys(f"{place}.{name}: no such field")
        values[name] = _checked(f"{place}.{name}", value, kinds[name].default)
    for name in ("name", "digest"):
        if name not in values:
            raise BadKeys(f"{place}.{name} is missing")
    try:
        return Key(**values)
    except BadKeys as error:
        raise BadKeys(f"{place}.{error}") from None


def _checked(place: str, value: Any, default: Any) -> Any:
    """Of the default's own type; lists of texts become tuples."""
    if isinstance(default, tuple):
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            raise BadKeys(f"{place}: expected a list of texts")
        return tuple(value)
    kind = str if default is dataclasses.MISSING else type(default)
    if type(value) is not kind:
        raise BadKeys(f"{place}: expected {kind.__name__}")
    return value


def _fields(key: Key) -> dict[str, Any]:
    fields = {field.name: (getattr(key, field.name), field.default) for field in dataclasses.fields(key)}
    return {name: value for name, (value, default) in fields.items() if value != default}
