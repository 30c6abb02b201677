"""`weft convert`: a checkpoint that Weft serves, made of a GGUF file or of Mistral's own layout."""

from __future__ import annotations

import errno
import importlib.util
import shlex
import sys
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from weft.cli.hub_models import progress_display
from weft.errors import BadCheckpoint, StorageUnavailable
from weft.file_io import TRANSIENT, format_os_error
from weft.mistral_layout import is_mistral_layout, link_checkpoint


def run_convert(gguf: Path, out: Path | None) -> int:
    """Convert a model. Returns the exit status: 2 for a model or a name to change, 1 if disk or system failed."""
    try:
        return _convert(gguf, out)
    except BadCheckpoint as error:
        return _failed(error, 2)
    except StorageUnavailable as error:
        return _failed(error, 1)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return _failed(f"{error.filename}: the disk is full; free space or name a directory on another disk", 2)
        return _failed(format_os_error(error), 1 if error.errno in TRANSIENT else 2)


def _failed(problem: object, status: int) -> int:
    print(f"weft convert: {problem}", file=sys.stderr)
    return status


def _convert(gguf: Path, out: Path | None) -> int:
    if is_mistral_layout(gguf):
        made = out or Path(f"{gguf.resolve().name}-weft")
        link_checkpoint(gguf, made)
        return _made(made)
    if importlib.util.find_spec("gguf") is None:
        return _failed("the package gguf is not installed: pip install 'weft[convert]'", 2)
    from weft.gguf_import.conversion import Conversion
    from weft.gguf_import.gguf_file import find_gguf, model_stem

    path = find_gguf(gguf)
    made = out or Path(model_stem(path))
    # A vocabulary of 262,144 tokens takes 8 s to read.
    with Console(stderr=True).status(f"reading {escape(str(path))}"):
        conversion = Conversion(path)
    with progress_display(made.name) as report:
        conversion.write(made, report)
    return _made(made)


def _made(made: Path) -> int:
    print(f"{made}: serve it with `weft up --model {shlex.quote(str(made))}`")
    return 0
