"""Finds the user's cache directory for Weft."""

from __future__ import annotations

import os
import stat
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path

UNUSABLE_DIR = Path(os.devnull) / "weft"
"""Every read or write below it raises OSError."""


def user_cache_dir() -> Path:
    """Return $XDG_CACHE_HOME/weft or ~/.cache/weft.

    A user without a home, as in many containers, gets a private directory among the temporary files.
    If that fails too, as on a full disk, the result is UNUSABLE_DIR.
    """
    if chosen := os.environ.get("XDG_CACHE_HOME"):
        return Path(chosen) / "weft"
    try:
        home = Path.home()
    except RuntimeError:
        return _fallback_dir()
    # Docker sets HOME to "/" for users without a passwd entry; they cannot write there
    return _fallback_dir() if home == Path("/") else home / ".cache" / "weft"


@cache
def _fallback_dir() -> Path:
    try:
        return _private_temp_dir()
    except OSError:
        return UNUSABLE_DIR


def _private_temp_dir() -> Path:
    """Return a directory that only this user can write, because cached libraries are executed.

    All processes of the user share it. If the name is taken, this process gets its own. Raises OSError.
    """
    folder = Path(tempfile.gettempdir()) / f"weft-{os.geteuid()}"
    with suppress(FileExistsError):  # a link, or a file
        folder.mkdir(mode=0o700, exist_ok=True)
    about = folder.lstat()
    is_own = stat.S_ISDIR(about.st_mode) and about.st_uid == os.geteuid() and not about.st_mode & 0o022
    return folder if is_own else Path(tempfile.mkdtemp(prefix="weft-"))
