"""The access log: one line for every exchange of the public listeners, over HTTP and gRPC, however it ended. The edges
open an entry and write it; whoever learns something about the request in between notes it here."""

from __future__ import annotations

import json
import logging
import re
import time
from contextvars import ContextVar
from typing import Any

logger = logging.getLogger(__name__)
MAX_CHARS = 200
PLAIN = re.compile(rf'[^\s"=\\]{{1,{MAX_CHARS}}}', re.ASCII)


class Entry:
    """A line as it comes about."""

    def __init__(self, method: str, path: str) -> None:
        self._began = time.monotonic()
        self._asked = {"method": method, "path": path}
        self._pairs: dict[str, Any] = {}
        self._level = logging.INFO

    def note(self, pairs: dict[str, Any], level: int = logging.INFO) -> None:
        """More of it, or something better known; what is empty says nothing."""
        self._pairs |= {name: value for name, value in pairs.items() if value not in (None, "")}
        self._level = max(self._level, level)

    def fail(self, error: Exception) -> None:
        """What went wrong, unless that is known already."""
        self._pairs.setdefault("error", f"{type(error).__name__}: {error}")

    def write(self, status: int | str) -> None:
        """It is over."""
        if not logger.isEnabledFor(self._level):
            return
        ends = {"total_ms": round((time.monotonic() - self._began) * 1000)}
        pairs = {**self._asked, "status": status, **ends, **self._pairs}
        logger.log(self._level, "%s", " ".join(f"{name}={_shown(value)}" for name, value in pairs.items()))


_current: ContextVar[Entry | None] = ContextVar("entry", default=None)


def opened(method: str, path: str) -> Entry:
    """The entry of what this task answers."""
    entry = Entry(method, path)
    _current.set(entry)
    return entry


def is_logged(level: int) -> bool:
    """Would a line of that level be written: what nobody reads need not be put together."""
    return logger.isEnabledFor(level)


def note(pairs: dict[str, Any], level: int = logging.INFO) -> None:
    """About what is being answered here; nothing happens where that is not logged."""
    if (entry := _current.get()) is not None:
        entry.note(pairs, level)


def note_error(error: Exception) -> None:
    """What went wrong; the first to say so knows best."""
    if (entry := _current.get()) is not None:
        entry.fail(error)


def _shown(value: Any) -> str:
    """In quotes where it would not be read back as one word: paths and errors have clients' words in them."""
    text = str(value)
    return text if PLAIN.fullmatch(text) else json.dumps(text[:MAX_CHARS])
