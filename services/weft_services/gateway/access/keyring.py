"""The accepted API keys, read from a file or Valkey and again whenever they change."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Protocol

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from weft.api_keys import (
    MAX_KEY_CHARS,
    VALKEY_KEYS,
    VALKEY_SCHEMES,
    VALKEY_VERSION,
    ApiKey,
    BadKeys,
    by_digest,
    digest_of,
    load_key,
    load_keys,
)
from weft.asyncio_compat import reraise_lost_cancellation
from weft.errors import ConfigError, PeerLost, Unauthenticated
from weft.rpc.valkey import checked_url

logger = logging.getLogger(__name__)
POLL_SECONDS = 1.0
READ_SECONDS = 5.0
MISSING = "no API key: send it as `Authorization: Bearer KEY` or as `x-api-key: KEY`"
# OpenAI's words; LiteLLM recognizes a bad key by them.
UNKNOWN = "Incorrect API key provided"
AMBIGUOUS = "more than one API key was sent, and they differ"
UNREADABLE = "API keys cannot be checked at the moment"


class KeySource(Protocol):
    """A storage backend for API keys."""

    async def changed(self) -> dict[str, ApiKey] | None:
        """Return all keys by digest, or None if nothing has changed. Raises BadKeys, OSError, RedisError."""

    async def close(self) -> None:
        """Release connections to the key storage."""


class FileKeySource:
    """Reads keys from a file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._signature: tuple[int, ...] = ()

    async def changed(self) -> dict[str, ApiKey] | None:
        """Compare inode, change time and size.

        A replaced file has another inode. A file that was rewritten, or has become readable, has another change time. A
        failed read is tried again.
        """
        stat = self._path.stat()
        signature = (stat.st_ino, stat.st_ctime_ns, stat.st_size)
        if signature == self._signature:
            return None
        content = await asyncio.to_thread(self._path.read_bytes)
        try:
            found = load_keys(content)
        except BadKeys as error:
            raise BadKeys(f"{self._path}: {error}") from error
        self._signature = signature
        return found

    async def close(self) -> None:
        """Do nothing; the file is not held open."""


class ValkeySource:
    """Reads keys from Valkey: a hash of entries by name, and a version number that grows with every change."""

    def __init__(self, url: str) -> None:
        """Raises ConfigError for a wrong URL."""
        once = Retry(NoBackoff(), 0)  # the poll loop retries soon
        url = checked_url(url, "WEFT_KEYS")
        self._redis = Redis.from_url(url, socket_timeout=READ_SECONDS, socket_connect_timeout=READ_SECONDS, retry=once)
        self._signature: bytes | str | None = None

    async def changed(self) -> dict[str, ApiKey] | None:
        """Compare the version number.

        No number means that no key was added yet, or that the server lost them. We keep our keys, and any later number
        is a change.
        """
        version = await self._redis.get(VALKEY_VERSION)
        if version is None:
            self._signature = None
        if version == self._signature:
            return None
        found = by_digest(map(load_key, await self._redis.hvals(VALKEY_KEYS)))
        self._signature = version
        return found

    async def close(self) -> None:
        """Close the connections to Valkey."""
        await self._redis.aclose()


class Keyring:
    """Keys by digest. If a read fails, the last keys remain valid."""

    def __init__(self, where: str) -> None:
        is_valkey = where.startswith(VALKEY_SCHEMES)
        self._source: KeySource = ValkeySource(where) if is_valkey else FileKeySource(Path(where))
        self._is_required = not is_valkey
        self._keys: Mapping[str, ApiKey] | None = None
        # True if the keys have more than one owner. Operators do not count: they work for the others.
        self.has_tenants = False
        self._last_problem = ""

    async def open(self) -> None:
        """Read the keys for the first time. Raises ConfigError for a file that cannot be read."""
        await self._read()
        if self._is_required and self._keys is None:
            raise ConfigError(f"WEFT_KEYS: {self._last_problem}; `weft keys add NAME --keys FILE` creates the file")

    async def run(self, changed: Callable[[], None]) -> None:
        """Poll for changes until cancelled; call `changed` after each one."""
        while True:
            await asyncio.sleep(POLL_SECONDS)
            if await self._read():
                changed()

    async def close(self) -> None:
        await self._source.close()

    def find(self, headers: Iterable[tuple[str | bytes, str | bytes]]) -> ApiKey:
        """Return the key in HTTP headers or gRPC metadata.

        Raises Unauthenticated, or PeerLost if no keys could be read yet. The lookup is by digest, so its duration does
        not reveal the stored keys.
        """
        secret = presented_secret(headers)
        if self._keys is None:
            raise PeerLost(UNREADABLE)
        found = self._keys.get(digest_of(secret))
        if found is None:
            raise Unauthenticated(UNKNOWN)
        return found

    def current(self, key: ApiKey) -> ApiKey | None:
        """Return the present state of a key, None if it was revoked."""
        return self._keys.get(key.digest) if self._keys is not None else None

    async def _read(self) -> bool:
        """Read the keys; return True if they changed."""
        try:
            with reraise_lost_cancellation():
                changed = await self._source.changed()
        except (BadKeys, OSError, RedisError) as error:
            self._log_problem(str(error) or type(error).__name__)
            return False
        self._log_problem("")
        if changed is not None:
            self._keys = changed
            self.has_tenants = len({key.owner for key in changed.values() if not key.operator}) > 1
            logger.info("keys=%d", len(changed))
        return changed is not None

    def _log_problem(self, problem: str) -> None:
        if problem and problem != self._last_problem:
            what = "none yet" if self._keys is None else "keeping the last ones"
            logger.error("api keys not read, %s error=%s", what, problem)
        self._last_problem = problem


def presented_secret(headers: Iterable[tuple[str | bytes, str | bytes]]) -> str:
    """Return the one key in the headers. Raises Unauthenticated if there is none, or if two differ."""
    shown: set[str] = set()
    for name, value in headers:
        match _text(name).lower():
            case "authorization":
                scheme, _, secret = _text(value).strip().partition(" ")
                shown.add(secret.strip() if scheme.lower() == "bearer" else "")
            case "x-api-key":
                shown.add(_text(value).strip())
    shown.discard("")
    if not shown:
        raise Unauthenticated(MISSING)
    if len(shown) > 1:
        raise Unauthenticated(AMBIGUOUS)
    secret = shown.pop()
    if len(secret) > MAX_KEY_CHARS:
        raise Unauthenticated(UNKNOWN)
    return secret


def _text(value: str | bytes) -> str:
    return value if isinstance(value, str) else value.decode("latin-1")
