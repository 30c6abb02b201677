"""How many files a process may have open."""

from __future__ import annotations

import resource


def allow_files() -> int:
    """As many as the system lets it, which is returned. A connection is a file, and processes begin with 1,024."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard
