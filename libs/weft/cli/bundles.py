"""`weft compress`, `decompress`, `verify`, `inspect`: their names only; a program of its own does the work."""

from __future__ import annotations

import os
import sys
from typing import Any, NoReturn

import typer
from typer.core import TyperCommand

app = typer.Typer(add_completion=False)


class PassedOn(TyperCommand):
    """Options, --help, and `--` before names that begin with a dash belong to the program that does the work."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Return the arguments as typed, for the bundle program."""
        ctx.args = args
        return args


@app.command(cls=PassedOn)
def compress(context: typer.Context) -> None:
    """Make a bundle of a checkpoint, about a third smaller and the same to the bit: MODEL OUT [--threads N]."""
    _bundle_tool(context)


@app.command(cls=PassedOn)
def decompress(context: typer.Context) -> None:
    """Make the checkpoint again that a bundle was made of: BUNDLE OUT [--threads N]."""
    _bundle_tool(context)


@app.command(cls=PassedOn)
def verify(context: typer.Context) -> None:
    """Decode a whole bundle and compare its checksums: BUNDLE [--threads N]."""
    _bundle_tool(context)


@app.command(cls=PassedOn)
def inspect(context: typer.Context) -> None:
    """What each tensor of a bundle takes, beside its entropy: BUNDLE [--plot FILE.svg]."""
    _bundle_tool(context)


def _bundle_tool(context: typer.Context) -> NoReturn:
    """Becomes the program that works on weights: the command line itself starts without numpy and the kernels."""
    os.execv(sys.executable, [sys.executable, "-m", "weft.weights.bundle", str(context.info_name), *context.args])
