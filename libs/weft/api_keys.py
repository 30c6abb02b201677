"""API keys: creation, the stored entry (a digest, never the key), and its permissions."""

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
# Priorities as clients send them: lower runs sooner.
MOST_URGENT, LEAST_URGENT = -10, 10
# In Valkey: a hash of entries by name, and a version that grows with every change.
VALKEY_SCHEMES = ("redis://", "rediss://", "unix://")
VALKEY_KEYS, VALKEY_VERSION = "weft:{keys}:entries", "weft:{keys}:version"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", re.ASCII)
_DIGEST = re.compile(r"[0-9a-f]{64}", re.ASCII)


class BadKeys(ValueError):
    """An unreadable list of keys; the message names the entry and the field."""


@dataclass(frozen=True, slots=True)
class ApiKey:
    """One entry of the key list.

    - `models`: the models it may use; empty means all.
    - `priority`: the most urgent priority it may request.
    - `requests_per_minute`, `tokens_per_minute`: limits; 0 means none.

    Keys of one tenant share a prefix cache and a share of the admission queue. Different tenants never do.
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
                raise BadKeys(f"{field}: {value!r}: expected up to 64 of A-Z a-z 0-9 . _ - and a letter or digit first")
        if not _DIGEST.fullmatch(self.digest):
            raise BadKeys("digest: expected the SHA-256 of the key, 64 hexadecimal digits in lower case")
        if not MOST_URGENT <= self.priority <= LEAST_URGENT:
            raise BadKeys(f"priority: {self.priority}: expected {MOST_URGENT} to {LEAST_URGENT}")
        for field in ("requests_per_minute", "tokens_per_minute"):
            if not 0 <= getattr(self, field) <= 10**9:
                raise BadKeys(f"{field}: {getattr(self, field)}: expected 0 to 10^9")

    @property
    def owner(self) -> str:
        """The tenant, or the key's own name without one."""
        return self.tenant or self.name

    @property
    def cache_salt(self) -> bytes:
        """Salt of the KV block keys; equal for keys of one tenant."""
        return hashlib.blake2b(self.owner.encode(), digest_size=16, person=b"weft-cache-salt").digest()

    def may_use(self, model: str) -> bool:
        """True if the key may use the model."""
        return not self.models or model in self.models


def make_secret() -> str:
    """Return a new key, to be shown once."""
    return PREFIX + secrets.token_urlsafe(SECRET_BYTES)


def digest_of(secret: str) -> str:
    """Return the SHA-256 of a key. A key has 256 random bits, so a plain hash cannot be searched."""
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).hexdigest()


def dump_keys(keys: Iterable[ApiKey]) -> str:
    """Return the text of a keys file, without fields that equal their default."""
    return json.dumps({"keys": [_fields(key) for key in keys]}, indent=2) + "\n"


def dump_key(key: ApiKey) -> str:
    """Return one entry as one line of JSON."""
    return json.dumps(_fields(key))


def load_keys(text: str | bytes) -> dict[str, ApiKey]:
    """Parse a keys file into keys by digest. Raises BadKeys."""
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadKeys(f"not JSON: {error}") from error
    entries = parsed.get("keys") if isinstance(parsed, dict) else None
    if not isinstance(entries, list):
        raise BadKeys('expected {"keys": [...]}')
    return by_digest(_parse(f"keys.{position}", entry) for position, entry in enumerate(entries))


def load_key(text: str | bytes) -> ApiKey:
    """Parse one entry. Raises BadKeys."""
    try:
        return _parse("key", json.loads(text))
    except (ValueError, RecursionError) as error:
        raise error if isinstance(error, BadKeys) else BadKeys(f"not JSON: {error}") from error


def by_digest(keys: Iterable[ApiKey]) -> dict[str, ApiKey]:
    """Index keys by digest. Raises BadKeys for a duplicate name or digest."""
    found: dict[str, ApiKey] = {}
    names: set[str] = set()
    for key in keys:
        if key.name in names or key.digest in found:
            raise BadKeys(f"{key.name}: another key has this name or digest")
        names.add(key.name)
        found[key.digest] = key
    return found


def _parse(place: str, entry: Any) -> ApiKey:
    if not isinstance(entry, Mapping):
        raise BadKeys(f"{place}: expected an object")
    kinds = {field.name: field for field in dataclasses.fields(ApiKey)}
    values: dict[str, Any] = {}
    for name, value in entry.items():
        if name not in kinds:
            raise BadKeys(f"{place}.{name}: no such field")
        values[name] = _checked(f"{place}.{name}", value, kinds[name].default)
    for name in ("name", "digest"):
        if name not in values:
            raise BadKeys(f"{place}.{name} is missing")
    try:
        return ApiKey(**values)
    except BadKeys as error:
        raise BadKeys(f"{place}.{error}") from None


def _checked(place: str, value: Any, default: Any) -> Any:
    """Return the value if it has the default's type; lists of strings become tuples."""
    if isinstance(default, tuple):
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            raise BadKeys(f"{place}: expected a list of strings")
        return tuple(value)
    kind = str if default is dataclasses.MISSING else type(default)
    if type(value) is not kind:
        raise BadKeys(f"{place}: expected {kind.__name__}")
    return value


def _fields(key: ApiKey) -> dict[str, Any]:
    fields = {field.name: (getattr(key, field.name), field.default) for field in dataclasses.fields(key)}
    return {name: value for name, (value, default) in fields.items() if value != default}
