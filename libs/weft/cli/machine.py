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
    from weft.file_io import format_os_error

    try:
        left = make_certs(folder, host or [])
    except (OSError, ValueError) as error:
        said = format_os_error(error) if isinstance(error, OSError) else error
        typer.secho(f"weft certs: {said}", fg="red", err=True)
        raise typer.Exit(1) from None
    print(f"{folder}: ca.pem, cert.pem and key.pem for every service; ca-key.pem makes new ones, keep it elsewhere")
    for command in left:
        typer.secho(f"services cannot read a new file until somebody gives it to their user: {command}", err=True)


@app.command()
def doctor(
    model: Annotated[list[str] | None, typer.Option(help="As for `weft up`: DIR or NAME=DIR, again for more.")] = None,
    host: Annotated[str, typer.Option(help="Where the gateway would listen.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="HTTP.")] = 8000,
    grpc_port: Annotated[int, typer.Option(min=1, max=65535, help="Public gRPC.")] = 9000,
    workers: Annotated[int, typer.Option(min=1, help="On this machine, for each model.")] = 2,
    deep: Annotated[bool, typer.Option("--deep", help="Decode bundles and compare their checksums.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Check what a mesh needs of this machine and say what to do; exits with 1 where something would not work."""
    from weft.cli.doctor.finding import Subject
    from weft.cli.doctor.run import run_doctor
    from weft.cli.up import UsageError, find_models

    try:
        models = find_models(model or [])
    except UsageError as error:
        typer.secho(f"weft doctor: {error}", fg="red", err=True)
        raise typer.Exit(2) from None
    subject = Subject(models, host, port, grpc_port, workers * len(models), is_deep=deep)
    raise typer.Exit(run_doctor(subject, as_json))
