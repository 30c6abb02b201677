"""Logging for all processes: key=value lines on stderr, the request id taken from a context variable."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sys
import time
from contextvars import ContextVar
from pathlib import Path

from weft.file_descriptors import open_streams

logger = logging.getLogger(__name__)
# `weft.cli.display` reads it
FORMAT = "%(asctime)s %(levelname).1s %(service)s %(message)s%(request)s"
MARK = re.compile(r"startup (?P<phase>.+) at=(?P<at>\d+\.\d+)")
"""What `mark` writes."""
ASLEEP, JOINING = "asleep", "joining"
"""Phases of a parked worker: until it is woken, after which it starts anew, and the last one of a start."""
PROGRESS = re.compile(r"progress (?P<what>.+): (?P<done>\d+) of (?P<total>\d+) MiB")
"""What `progress` writes."""
USUAL_LEVEL = "INFO"
request_id: ContextVar[str] = ContextVar("request_id", default="")


class _Formatter(logging.Formatter):
    def __init__(self, service: str) -> None:
        super().__init__(FORMAT, "%Y-%m-%dT%H:%M:%S%z")
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        record.service = self._service
        current = request_id.get()
        record.request = f" request={current}" if current else ""
        return super().format(record)


def setup(service: str) -> None:
    """Send records to stderr. `service` is the process' name in the merged log, e.g. decode-0, and on Linux for `ps -o
    comm` and `top`: command lines do not tell which worker a process became. Ends the process for a level that there is
    not."""
    open_streams()
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text(service)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Formatter(service))
    level = os.environ.get("WEFT_LOG_LEVEL", "").upper() or USUAL_LEVEL
    is_known = level in logging.getLevelNamesMapping()
    logging.basicConfig(level=level if is_known else USUAL_LEVEL, handlers=[handler], force=True)
    for chatty in ("httpx", "uvicorn.access", "uvicorn.error", "httpcore"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    if not is_known:
        logger.error("cannot start: WEFT_LOG_LEVEL=%r: expected DEBUG, INFO, WARNING or ERROR", level)
        sys.exit(2)  # as `weft.rpc.server.run` does with settings that are read later


def mark(phase: str) -> None:
    """A phase of this process' start is over; `weft up --timeline` draws them."""
    logger.info("startup %s at=%.3f", phase, time.time())


def progress(what: str, done_bytes: int, total_bytes: int) -> None:
    """A long phase of this process' start moves on; `weft up` gives it more time."""
    logger.info("progress %s: %d of %d MiB", what, done_bytes >> 20, total_bytes >> 20)
