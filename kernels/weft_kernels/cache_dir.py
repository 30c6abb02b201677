"""Where a user's caches are."""

from __future__ import annotations

import os
import stat
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path

UNUSABLE_DIR = Path(os.devnull) / "weft"
"""To read or write there is an OSError, as with any folder that cannot be had."""


def user_cache_dir() -> Path:
    """Weft's: in $XDG_CACHE_HOME, else with the user, else, as containers have users without a home, with temporary
    files. Where there is no place for those either, as on a full disk, it is NOWHERE."""
    if chosen := os.environ.get("XDG_CACHE_HOME"):
        return Path(chosen) / "weft"
    try:
        home = Path.home()
    except RuntimeError:
        return _fallback_dir()
    # "/" is what Docker has for a user that is in no passwd, and who may not write there
    return _fallback_dir() if home == Path("/") else home / ".cache" / "weft"


@cache
def _fallback_dir() -> Path:
    try:
        return _private_temp_dir()
    except OSError:
        return UNUSABLE_DIR


def _private_temp_dir() -> Path:
    """One that is the user's alone, as what lies there is run: the same for all processes, or one for this process
    where somebody else has taken its name. Raises OSError."""
    folder = Path(tempfile.gettempdir()) / f"weft-{os.geteuid()}"
    with suppress(FileExistsError):  # a link, or a file
        folder.mkdir(mode=0o700, exist_ok=True)
    about = folder.lstat()
    is_own = stat.S_ISDIR(about.st_mode) and about.st_uid == os.geteuid() and not about.st_mode & 0o022
    return folder if is_own else Path(tempfile.mkdtemp(prefix="weft-"))
