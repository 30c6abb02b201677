"""`weft keys`: adds, lists and revokes API keys in a file or in Valkey. A key is shown once; a digest of it is kept."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

from weft.api_keys import LEAST_URGENT, MOST_URGENT, ApiKey, BadKeys, by_digest, digest_of, make_secret

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

    from weft.cli.key_store import read_keys

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
    from weft.cli.key_store import read_keys

    with _told():
        read_keys(keys)  # of a file that is not there that is to be said, and no folder is to be made for it
        _change(keys, lambda found: _without(found, name))


def _change(keys: str, change: Callable[[dict[str, ApiKey]], dict[str, ApiKey]]) -> None:
    from weft.cli.key_store import change_keys

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
