"""`python -m weft_bundle`: what `weft compress`, `decompress`, `verify` and `inspect` run."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Column, Table

from weft.config import Settings, read_config
from weft.errors import ConfigError, StorageUnavailable, WeftError
from weft.file_descriptors import ensure_stdio, flush_stdout_on_exit
from weft.file_io import TRANSIENT, with_filename
from weft.options import CpuKernels
from weft.weights.formats import BUNDLE_SUFFIX
from weft_bundle import convert
from weft_bundle.format import read_bundle_header
from weft_bundle.inspection import TensorRow, svg_chart, tensor_rows, total_entropy

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)
PIPE_COLUMNS = 1 << 20
"""Width of piped output: each tensor is one line."""
AS_IT_IS: dict[str, Any] = {"highlight": False, "markup": False, "emoji": False}  # a path may contain [red] or :key:
console = Console(soft_wrap=True, **AS_IT_IS)
Threads = Annotated[int, typer.Option(min=0, help="0: all cores.")]


class _Environment(Settings):
    """Environment settings to validate; the native kernels read the variable themselves."""

    cpu_kernels: CpuKernels | None = None


@app.command()
def compress(model: Path, out: Path, threads: Threads = 0) -> None:
    """Make a bundle of a checkpoint: the same weights to the bit, about a third smaller."""
    with _progress(model, convert.WEIGHTS_SUFFIX) as report:
        _print_result(convert.compress(model, out, _count(threads), report), out)


@app.command()
def decompress(bundle: Path, out: Path, threads: Threads = 0) -> None:
    """Make the checkpoint again that a bundle was made of, byte for byte."""
    with _progress(bundle, BUNDLE_SUFFIX) as report:
        _print_result(convert.decompress(bundle, out, _count(threads), report), out)


@app.command()
def verify(bundle: Path, threads: Threads = 0) -> None:
    """Decode everything and compare all checksums; writes nothing."""
    with _progress(bundle, BUNDLE_SUFFIX) as report:
        outcome = convert.verify(bundle, _count(threads), report)
    console.print(f"{bundle}: {outcome.num_files} files, {_mb(outcome.original_bytes)} of weights, all as they were")


@app.command()
def inspect(
    bundle: Path, plot: Annotated[Path | None, typer.Option(help="Write a picture (SVG) here.")] = None
) -> None:
    """Show what every tensor takes, beside the entropy of its weights."""
    if plot:
        with with_filename(plot):
            plot.open("a").close()  # fail before the bundle is read, not after
    with _progress(bundle, BUNDLE_SUFFIX) as report:
        rows = list(tensor_rows(bundle, report))
    screen = console if sys.stdout.isatty() else Console(width=PIPE_COLUMNS, **AS_IT_IS)
    screen.print(_table(rows), soft_wrap=False)
    if plot:
        with with_filename(plot):
            plot.write_text(svg_chart(str(bundle), rows), encoding="utf-8")
        console.print(f"plot: {plot}")


@contextmanager
def _progress(directory: Path, suffix: str) -> Iterator[convert.Report]:
    convert.weight_files(directory, suffix)
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        total = sum(_original_size(path) for path in convert.weight_files(directory, suffix))
        task = progress.add_task("", total=total)
        lock = threading.Lock()

        def report(name: str, num_bytes: int) -> None:
            with lock:
                progress.update(task, advance=num_bytes, description=name)

        yield report
        progress.update(task, completed=total)  # headers count towards the total but belong to no tensor


def _original_size(path: Path) -> int:
    if path.suffix == BUNDLE_SUFFIX:
        return read_bundle_header(path).original.size_bytes
    return path.stat().st_size


def _print_result(outcome: convert.ConversionResult, out: Path) -> None:
    kept = f", {outcome.num_kept} of them from an earlier run" if outcome.num_kept else ""
    share = 100 * outcome.stored_bytes / max(1, outcome.original_bytes)
    console.print(
        f"{out}: {outcome.num_files} files{kept}; {_mb(outcome.original_bytes)} of weights, "
        f"{_mb(outcome.stored_bytes)} in the bundle: {share:.2f} %"
    )


def _table(rows: list[TensorRow]) -> Table:
    titles = ("tensor", "dtype", "shape", "codec", "bytes", "stored", "entropy")
    table = Table(*(Column(title, overflow="fold") for title in titles))
    for row in rows:
        bound = "" if row.entropy is None else f"{100 * row.entropy:.2f} %"
        shape = "x".join(map(str, row.shape))
        table.add_row(row.label, row.dtype, shape, row.codec, str(row.stored_bytes), f"{100 * row.share:.2f} %", bound)
    stored, original = sum(row.stored_bytes for row in rows), sum(row.original_bytes for row in rows)
    bound = f"{100 * total_entropy(rows):.2f} %"
    table.add_row("all", "", "", "", str(stored), f"{100 * stored / max(1, original):.2f} %", bound)
    return table


def _count(threads: int) -> int:
    return threads or len(os.sched_getaffinity(0))


def _mb(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.1f} MB"


def main() -> int:
    """Run the program. Status 2: user error, 1: disk or storage failure; each error is one line."""
    ensure_stdio()
    try:
        read_config(_Environment)
        with flush_stdout_on_exit():
            app(standalone_mode=True, prog_name="weft")  # users run these as `weft` commands
    except StorageUnavailable as error:
        print(f"weft: {error}", file=sys.stderr)
        return 1
    except (WeftError, ConfigError, OSError) as error:
        print(f"weft: {error}", file=sys.stderr)
        return 1 if isinstance(error, OSError) and error.errno in TRANSIENT else 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
