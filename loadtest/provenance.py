"""The date and commit of a results page."""

from __future__ import annotations

import subprocess
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).parents[1]


def made_at() -> str:
    """As pages say it, e.g. "21 November 2026, commit 13fb271"; and whether files differed from those of the commit."""
    changes = ", with changes" if _git("status", "--porcelain", "--untracked-files=no") else ""
    return f"{datetime.now(UTC):%-d %B %Y}, commit {_git('rev-parse', '--short', 'HEAD')}{changes}"


def _git(*words: str) -> str:
    run = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True)
    return run.stdout.strip()
