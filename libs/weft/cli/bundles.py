"""`weft compress`, `decompress`, `verify`, `inspect`: their names only; a program of its own does the work."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

import typer

app = typer.Typer(add_completion=False)
# Options and --help belong to the program that does the work.
PASSED_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


@app.command(context_settings=PASSED_ON)
def compress(context: typer.Context) -> None:
    """Make a bundle of a checkpoint, about a third smaller and the same to the bit: MODEL OUT [--threads N]."""
    _bundle_tool(context)


@app.command(context_settings=PASSED_ON)
def decompress(context: typer.Context) -> None:
    """Make the checkpoint again that a bundle was made of: BUNDLE OUT [--threads N]."""
    _bundle_tool(context)


@app.command(context_settings=PASSED_ON)
def verify(context: typer.Context) -> None:
    """Decode a whole bundle and compare its checksums: BUNDLE [--threads N]."""
    _bundle_tool(context)


@app.command(context_settings=PASSED_ON)
def inspect(context: typer.Context) -> None:
    """What each tensor of a bundle takes, beside its entropy: BUNDLE [--plot FILE.svg]."""
    _bundle_tool(context)


def _bundle_tool(context: typer.Context) -> NoReturn:
    """Becomes the program that works on weights: the command line itself starts without numpy and the kernels."""
    from importlib.util import find_spec

    if find_spec("torch") is None:
        typer.secho("weft: this needs the engine's libraries: pip install 'weft[engine]'", fg="red", err=True)
        raise typer.Exit(2)
    os.execv(sys.executable, [sys.executable, "-m", "weft.weights.bundle", str(context.info_name), *context.args])
