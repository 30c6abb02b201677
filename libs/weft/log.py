"""Logging for all processes: key=value lines on stderr, with the request id from a context variable."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sys
import time
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path

from weft.file_descriptors import ensure_stdio
from weft.options import HOW_TO_INSTALL

logger = logging.getLogger(__name__)
# `weft.cli.display` parses this format.
FORMAT = "%(asctime)s %(levelname).1s %(service)s %(message)s%(request)s"
STARTUP_PHASE = re.compile(r"startup (?P<phase>.+) at=(?P<at>\d+\.\d+)")
"""Matches the lines of `startup_phase`."""
SLEEPING, JOINING = "asleep", "joining"
"""Startup phases: the end of a worker's sleep, and the last phase of every start."""
PROGRESS = re.compile(r"progress (?P<what>.+): (?P<done>\d+) of (?P<total>\d+) MiB")
"""Matches the lines of `progress`."""
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
    """Send records to stderr. Exits with status 2 for an unknown WEFT_LOG_LEVEL.

    `service` is the process' name in the merged log, e.g. decode-0, and on Linux in `ps -o comm` and `top`, where
    command lines do not show which worker a process became.
    """
    ensure_stdio()
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
        sys.exit(2)  # Same status as `weft.rpc.server.run` uses for later settings.


@contextlib.contextmanager
def engine_imports(service: str) -> Iterator[None]:
    """Import torch inside; if it is not installed, log one line and exit with status 2."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        setup(service)
        logger.error("cannot start: torch is not installed; %s", HOW_TO_INSTALL)
        sys.exit(2)


def startup_phase(phase: str) -> None:
    """Log the end of a startup phase; `weft up --timeline` draws these."""
    logger.info("startup %s at=%.3f", phase, time.time())


def progress(what: str, done_bytes: int, total_bytes: int) -> None:
    """Log the progress of a long startup phase; `weft up` then extends its timeout."""
    logger.info("progress %s: %d of %d MiB", what, done_bytes >> 20, total_bytes >> 20)
