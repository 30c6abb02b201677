"""`weft pull` and `weft models`, and the progress of downloads on a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from weft.errors import BadCheckpoint, StorageUnavailable
from weft.hub import HubName, fetch_model, hub_name
from weft.tokenizer import check_tokenizer

LINE_SECONDS = 10.0


def run_pull(names: Sequence[str]) -> int:
    """Fetch these models and compare all checksums. Returns the exit status: 2 for a wrong name, 1 to try again."""
    status = 0
    for text in names:
        name = hub_name(text)
        try:
            if name is None:
                what = "it is a path here" if Path(text).exists() else "expected ORG/REPO or ORG/REPO@REVISION"
                raise BadCheckpoint(f"{text}: {what}; name a model of the Hugging Face Hub")
            print(fetch_with_display(name, is_thorough=True))
        except (BadCheckpoint, StorageUnavailable) as error:
            print(f"weft pull: {error}", file=sys.stderr)
            status = max(status, 2 if isinstance(error, BadCheckpoint) else 1)
    return status


def fetch_with_display(name: HubName, is_thorough: bool = False) -> Path:
    """Fetch a model with a progress bar, or lines if standard error is no terminal."""
    with progress_display(str(name)) as report:
        return fetch_model(name, report, is_thorough=is_thorough)


@contextmanager
def progress_display(label: str) -> Iterator[Callable[[int, int], None]]:
    """Yield a report that takes the bytes done and all bytes: a bar, or lines if standard error is no terminal."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _lines(label)
        return
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as bar:
        task = bar.add_task(label, total=None, visible=False)
        yield lambda done, total: bar.update(task, completed=done, total=total, visible=True)


def _lines(label: str) -> Callable[[int, int], None]:
    """Return a report that prints a line at the start, every 10 s and at the end."""
    printed_at = -LINE_SECONDS

    def report(done: int, total: int) -> None:
        nonlocal printed_at
        if done >= total or time.monotonic() - printed_at >= LINE_SECONDS:
            printed_at = time.monotonic()
            print(f"{label}: {done / 1e6:.1f} of {total / 1e6:.1f} MB", file=sys.stderr, flush=True)

    return report


def run_models() -> int:
    """Print the models of the Hub's cache: name, size, commit, and whether Weft serves them."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repositories = [each for each in scan_cache_dir().repos if each.repo_type == "model"]
    except CacheNotFound as error:
        print(f"no models: {error.cache_dir} does not exist; `weft pull ORG/REPO` fetches one", file=sys.stderr)
        return 0
    rows = [("model", "revision", "size", "served")]
    for repository in sorted(repositories, key=lambda each: each.repo_id):
        for revision in sorted(repository.revisions, key=lambda each: each.commit_hash):
            shown = ",".join(sorted(revision.refs)) or revision.commit_hash[:12]
            reason = _refusal(revision.snapshot_path)
            size = f"{revision.size_on_disk / 1e9:.2f} GB"
            rows.append((repository.repo_id, shown, size, f"no: {reason}" if reason else "yes"))
    widths = tuple(max(len(row[column]) for row in rows) for column in range(3))
    for row in rows:
        print(f"{row[0]:<{widths[0]}}  {row[1]:<{widths[1]}}  {row[2]:>{widths[2]}}  {row[3]}")
    return 0


def _refusal(snapshot: Path) -> str:
    """Return why Weft does not serve this snapshot; empty if it does."""
    from weft.weights.checkpoint import read_checkpoint

    try:
        read_checkpoint(snapshot)
        check_tokenizer(snapshot)
    except (BadCheckpoint, StorageUnavailable) as error:
        # without the advice: this is one column of a table
        return str(error).replace(f"{snapshot}/", "").replace(f"{snapshot}: ", "").partition(";")[0]
    return ""
