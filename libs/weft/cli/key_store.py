"""Where API keys are kept, a file or Valkey, and how a list of them is changed while others read it."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import redis

from weft.api_keys import (
    VALKEY_KEYS,
    VALKEY_SCHEMES,
    VALKEY_VERSION,
    ApiKey,
    BadKeys,
    by_digest,
    dump_key,
    dump_keys,
    load_key,
    load_keys,
)
from weft.config import ConfigError, redact_credentials
from weft.rpc.valkey import checked_url

SECONDS, RETRY_SECONDS = 5.0, 0.05
FORGETFUL = "this Valkey forgets what it likes when it is full (maxmemory-policy); keys want one with noeviction"
Change = Callable[[dict[str, ApiKey]], dict[str, ApiKey]]


def read_keys(where: str) -> dict[str, ApiKey]:
    """By digest. Raises BadKeys, OSError where Valkey fails."""
    if not _is_valkey(where):
        with _named(where, "cannot be read"):
            return _read_file(Path(where))
    with _opened(where) as server:
        return _read_valkey(server)


def change_keys(where: str, change: Change) -> str:
    """All of it or nothing, one change at a time; returns a warning or nothing. Raises BadKeys or OSError."""
    if not _is_valkey(where):
        # behind a link: to revoke a key there is to revoke it for the gateway, which may know the file by another name
        with _named(where, "cannot be written"):
            _change_file(Path(os.path.realpath(where)), change)
        return ""
    with _opened(where) as server:
        _change_valkey(server, change)
        return _warning(server)


@contextmanager
def _named(where: str, what: str) -> Iterator[None]:
    """Errors name the file that was given, not the one that is written to replace it."""
    if os.path.isdir(where):
        raise BadKeys(f"{where or '--keys'}: is a directory; name a file, {os.path.join(where, 'keys.json')} say")
    try:
        yield
    except OSError as error:
        if isinstance(error, FileNotFoundError) and error.filename is None:
            raise  # the current directory is gone
        folder = os.path.dirname(where) or "."
        reason = error.strerror or str(error)
        if isinstance(error, FileNotFoundError) and os.path.isdir(folder):
            reason = f"no file can be made in {folder}"
        raise BadKeys(f"{where}: {what}: {reason}") from error


def _is_valkey(where: str) -> bool:
    """Raises BadKeys for a URL of something else, of which a file would be called."""
    if "://" in where and not where.startswith(VALKEY_SCHEMES):
        schemes = ", ".join(VALKEY_SCHEMES)
        raise BadKeys(f"--keys {redact_credentials(where)}: expected a file, or a URL that begins with {schemes}")
    return "://" in where


def _warning(server: Any) -> str:
    """Asked after the change: a user who may not ask has his key all the same."""
    try:
        memory = server.info("memory")
    except redis.RedisError:
        return ""
    return FORGETFUL if str(memory.get("maxmemory_policy", "")).startswith("allkeys") else ""


def _read_file(path: Path) -> dict[str, ApiKey]:
    try:
        return load_keys(path.read_bytes())
    except FileNotFoundError:
        raise BadKeys(f"{path}: no such file; `weft keys add NAME` makes it, --keys names another") from None
    except BadKeys as error:
        raise BadKeys(f"{path}: {error}") from None


def _change_file(path: Path, change: Change) -> None:
    """Replaced in one step, so that nobody reads half of it. Others may read it: the gateway may run as another user,
    and no key can be made of what it says."""
    path.parent.mkdir(parents=True, exist_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        _lock(folder, path)
        changed = change(_read_file(path) if path.exists() else {})
        partial = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            partial.write_text(dump_keys(changed.values()))
            partial.chmod(0o644)
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
    finally:
        os.close(folder)


def _lock(folder: int, path: Path) -> None:
    """Until it is closed. Raises OSError where somebody else keeps it: one change takes no time."""
    deadline = time.monotonic() + SECONDS
    while True:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise OSError(f"{path}: somebody else has kept {path.parent} locked for {SECONDS:g} s") from None
        time.sleep(RETRY_SECONDS)


@contextmanager
def _opened(url: str) -> Iterator[redis.Redis]:
    try:
        checked_url(url, "--keys")
    except ConfigError as error:
        raise OSError(str(error)) from error
    try:
        with redis.Redis.from_url(url, socket_timeout=SECONDS, socket_connect_timeout=SECONDS) as server:
            yield server
    except redis.RedisError as error:
        raise OSError(f"Valkey: {error}") from error


def _read_valkey(server: Any) -> dict[str, ApiKey]:
    return by_digest(map(load_key, server.hvals(VALKEY_KEYS)))


def _change_valkey(server: redis.Redis, change: Change) -> None:
    def transaction(pipe: Any) -> None:
        before = _read_valkey(pipe)
        after = change(before)
        pipe.multi()
        for digest in before.keys() - after.keys():
            pipe.hdel(VALKEY_KEYS, before[digest].name)
        for digest in after.keys() - before.keys():
            pipe.hset(VALKEY_KEYS, after[digest].name, dump_key(after[digest]))
        pipe.incr(VALKEY_VERSION)

    server.transaction(transaction, VALKEY_KEYS)
