"""The access log: one line for every request of the public listeners, over HTTP and gRPC, however it ended.

A listener opens an entry and writes it. Modules in between add what they learn about the request with `note`.
"""

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


class AccessLogEntry:
    """A log line under construction."""

    def __init__(self, method: str, path: str) -> None:
        self._began = time.monotonic()
        self._request_fields = {"method": method, "path": path}
        self._pairs: dict[str, Any] = {}
        self._level = logging.INFO

    def note(self, pairs: dict[str, Any], level: int = logging.INFO) -> None:
        """Add or replace fields; empty values are left out."""
        self._pairs |= {name: value for name, value in pairs.items() if value not in (None, "")}
        self._level = max(self._level, level)

    def fail(self, error: Exception) -> None:
        """Record the error unless an earlier one is recorded."""
        self._pairs.setdefault("error", f"{type(error).__name__}: {error}")

    def write(self, status: int | str) -> None:
        if not logger.isEnabledFor(self._level):
            return
        ends = {"total_ms": round((time.monotonic() - self._began) * 1000)}
        pairs = {**self._request_fields, "status": status, **ends, **self._pairs}
        logger.log(self._level, "%s", " ".join(f"{name}={_quoted(value)}" for name, value in pairs.items()))


_current: ContextVar[AccessLogEntry | None] = ContextVar("entry", default=None)


def open_entry(method: str, path: str) -> AccessLogEntry:
    """Open the entry of the current task's request."""
    entry = AccessLogEntry(method, path)
    _current.set(entry)
    return entry


def is_logged(level: int) -> bool:
    """Return whether a line of that level is written, so that callers can skip building it."""
    return logger.isEnabledFor(level)


def note(pairs: dict[str, Any], level: int = logging.INFO) -> None:
    """Add fields to the current request's line, if it has one."""
    if (entry := _current.get()) is not None:
        entry.note(pairs, level)


def note_error(error: Exception) -> None:
    """Record an error of the current request. The first one wins because it is closest to the cause."""
    if (entry := _current.get()) is not None:
        entry.fail(error)


def _quoted(value: Any) -> str:
    """Quote the value unless it reads back as one word. Paths and errors contain client input."""
    text = str(value)
    return text if PLAIN.fullmatch(text) else json.dumps(text[:MAX_CHARS])
