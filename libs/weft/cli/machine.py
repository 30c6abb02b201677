"""`weft certs` and `weft doctor`: options in, one function call out. What a machine needs before a mesh runs on it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer()


@app.command()
def certs(
    folder: Annotated[Path, typer.Argument(help="What WEFT_TLS_DIR will name, on every machine of the mesh.")],
    host: Annotated[list[str] | None, typer.Option(help="A name that clients call the gateway by.")] = None,
) -> None:
    """Make a certificate authority and a certificate; where there is an authority, a new certificate by it."""
    from weft.cli.certs import make_certs

    try:
        make_certs(folder, host or [])
    except (OSError, ValueError) as error:
        typer.secho(f"weft certs: {error}", fg="red", err=True)
        raise typer.Exit(1) from None
    print(f"{folder}: ca.pem, cert.pem and key.pem for every service; ca-key.pem makes new ones, keep it elsewhere")
