"""`weft keys`: adds, lists and revokes API keys in a file or in Valkey, atomically while gateways read them.

A key is shown once; a digest of it is kept.
"""

from __future__ import annotations

import fcntl
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weft.api_keys import (
    LEAST_URGENT,
    MOST_URGENT,
    VALKEY_KEYS,
    VALKEY_SCHEMES,
    VALKEY_VERSION,
    ApiKey,
    BadKeys,
    by_digest,
    digest_of,
    dump_key,
    dump_keys,
    load_key,
    load_keys,
    make_secret,
)
from weft.errors import ConfigError
from weft.options import redact_credentials

if TYPE_CHECKING:
    import redis

app = typer.Typer(name="keys", help="API keys: add, list, revoke.", no_args_is_help=True)
Keys = Annotated[str, typer.Option("--keys", envvar="WEFT_KEYS", help="A file, or redis://HOST:PORT/DB for a fleet.")]
Name = Annotated[str, typer.Argument(help="Name of the key, as logs show it.")]
# columns without a terminal: a key is one line, for scripts
WIDEST = 100_000


@app.command()
def add(
    name: Name,
    keys: Keys = "keys.json",
    tenant: Annotated[str, typer.Option(help="Tenant of the key; keys of a tenant share a cache. Default: NAME.")] = "",
    model: Annotated[
        list[str] | None, typer.Option(help="A model that the key may use; repeat for more. Default: all.")
    ] = None,
    priority: Annotated[
        int,
        typer.Option(
            min=MOST_URGENT, max=LEAST_URGENT, help="Most urgent priority that it may request; lower is sooner."
        ),
    ] = 0,
    requests_per_minute: Annotated[int, typer.Option(min=0, help="0: no limit.")] = 0,
    tokens_per_minute: Annotated[int, typer.Option(min=0, help="Prompt and answer tokens; 0: no limit.")] = 0,
    operator: Annotated[bool, typer.Option("--operator", help="Allow it to inspect and control the mesh.")] = False,
) -> None:
    """Create a key and print its secret once."""
    secret = make_secret()
    with _told():
        key = ApiKey(
            name=name,
            digest=digest_of(secret),
            tenant=tenant,
            models=tuple(model or ()),
            priority=priority,
            requests_per_minute=requests_per_minute,
            tokens_per_minute=tokens_per_minute,
            operator=operator,
        )
        _change(keys, lambda found: by_digest([*found.values(), key]))
    print(secret)


@app.command(name="list")
def list_keys(keys: Keys = "keys.json") -> None:
    """List the keys and what each may do."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    with _told():
        found = read_keys(keys)
    table = Table(box=SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    for title in ("name", "tenant", "models", "priority", "requests\n/min", "tokens\n/min", "operator", "digest"):
        table.add_column(title, overflow="fold")  # `weft keys revoke` wants the whole name
    for key in found.values():
        limits = (str(limit or "-") for limit in (key.requests_per_minute, key.tokens_per_minute))
        models = ", ".join(key.models) or "all"
        flag = "yes" if key.operator else "-"
        table.add_row(key.name, key.owner, Text(models), str(key.priority), *limits, flag, key.digest[:12])
    Console(width=None if sys.stdout.isatty() else WIDEST).print(table)


@app.command()
def revoke(name: Name, keys: Keys = "keys.json") -> None:
    """Gateways that are running refuse it a second later."""
    with _told():
        read_keys(keys)  # of a file that is not there that is to be said, and no folder is to be made for it
        _change(keys, lambda found: _without(found, name))


def _change(keys: str, change: Callable[[dict[str, ApiKey]], dict[str, ApiKey]]) -> None:
    if warning := change_keys(keys, change):
        typer.secho(f"weft keys: {warning}", fg="yellow", err=True)


def _without(found: dict[str, ApiKey], name: str) -> dict[str, ApiKey]:
    kept = {digest: key for digest, key in found.items() if key.name != name}
    if len(kept) == len(found):
        raise BadKeys(f"there is no key named {name!r}; `weft keys list` has them all")
    return kept


@contextmanager
def _told() -> Iterator[None]:
    try:
        yield
    except (BadKeys, OSError) as error:
        if isinstance(error, FileNotFoundError) and error.filename is None:
            raise  # not a file, but the current directory: `weft.cli.main` says so
        typer.secho(f"weft keys: {error}", fg="red", err=True)
        raise typer.Exit(1) from None


SECONDS, RETRY_SECONDS = 5.0, 0.05
FORGETFUL = "this Valkey evicts keys when it is full; set maxmemory-policy to noeviction for API keys"
Change = Callable[[dict[str, ApiKey]], dict[str, ApiKey]]


def read_keys(where: str) -> dict[str, ApiKey]:
    """Return the keys by digest. Raises BadKeys; OSError if Valkey fails."""
    if not _is_valkey(where):
        with _named(where, "cannot be read"):
            return _read_file(Path(where))
    with _opened(where) as server:
        return _read_valkey(server)


def change_keys(where: str, change: Change) -> str:
    """Apply one change atomically; return a warning or an empty string. Raises BadKeys or OSError."""
    if not _is_valkey(where):
        # follow links: the gateway may read the file by another name, and must see a revoked key
        with _named(where, "cannot be written"):
            _change_file(Path(os.path.realpath(where)), change)
        return ""
    with _opened(where) as server:
        _change_valkey(server, change)
        return _warning(server)


@contextmanager
def _named(where: str, what: str) -> Iterator[None]:
    """Turn OSError into BadKeys with the name of the given file, not of the temporary one."""
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
    """Return whether `where` is a Valkey URL. Raises BadKeys for a URL of another scheme."""
    if "://" in where and not where.startswith(VALKEY_SCHEMES):
        schemes = ", ".join(VALKEY_SCHEMES)
        raise BadKeys(f"--keys {redact_credentials(where)}: expected a file, or a URL that begins with {schemes}")
    return "://" in where


def _warning(server: Any) -> str:
    """Return a warning if Valkey may evict keys; nothing if the user may not ask it."""
    import redis

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
    """Replace the file atomically. It is readable by all, as the gateway may run as another user; it has no secrets."""
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
    """Lock the folder until its descriptor is closed. Raises OSError after SECONDS."""
    deadline = time.monotonic() + SECONDS
    while True:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise OSError(f"{path}: another process has held the lock of {path.parent} for {SECONDS:g} s") from None
        time.sleep(RETRY_SECONDS)


@contextmanager
def _opened(url: str) -> Iterator[redis.Redis]:
    import redis  # only for keys in Valkey: its import takes longer than the rest of `weft --help`

    from weft.rpc.valkey import checked_url

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
