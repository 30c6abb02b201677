"""JSON files that somebody else wrote: read whole, or refused by name."""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path
from typing import Any

from weft.errors import BadCheckpoint
from weft.foreign_files import dangling, foreign_content
from weft.storage import read_small, told

MAX_DEPTH = 100


def read_object(path: Path) -> dict[str, Any]:
    """Raises BadCheckpoint for a file that holds no JSON object, or a larger or deeper one than any model needs,
    Unreadable where the disk fails."""
    try:
        content = read_small(path)
        values = json.loads(content.decode("utf-8-sig"))
    except FileNotFoundError:
        raise BadCheckpoint(f"{path}: {dangling(path) if path.is_symlink() else 'no such file'}") from None
    except OSError as error:
        raise told(error, f"{path}: not readable") from error
    except (ValueError, RecursionError) as error:
        what = foreign_content(content) or error
        raise BadCheckpoint(f"{path}: not readable as JSON: {what}") from error
    if _is_deep(values):  # who writes it, or shows it, has less room on the stack than we had
        raise BadCheckpoint(f"{path}: nested in more than {MAX_DEPTH} levels")
    if not isinstance(values, dict):
        raise BadCheckpoint(f"{path}: expected a JSON object, found {type(values).__name__}")
    return values


def _is_deep(value: Any) -> bool:
    level = [value]
    for _ in range(MAX_DEPTH):
        inner = (each.values() if isinstance(each, dict) else each for each in level if isinstance(each, dict | list))
        if not (level := list(chain.from_iterable(inner))):
            return False
    return True
