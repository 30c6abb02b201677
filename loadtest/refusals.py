"""Time until `weft up` rejects each checkpoint that it does not serve, as a process of its own.

    python -m loadtest.refusals [--slowest 5]

Prints the slowest kinds. Fails if a kind is not rejected with exit code 2 and one line.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.weft.cli.unsupported import cases

from loadtest.processes import BenchError

UP = [sys.executable, "-m", "weft.cli.main", "up", "--model"]


def rejection_seconds(path: Path) -> float:
    """Return the time from the start of the process to its end. Raises BenchError if the model is not rejected."""
    began = time.perf_counter()
    ended = subprocess.run([*UP, str(path)], capture_output=True, text=True, timeout=60)
    seconds = time.perf_counter() - began
    if ended.returncode != 2 or ended.stdout or len(ended.stderr.splitlines()) != 1:
        raise BenchError(f"{path}: expected one line and exit code 2, found {ended.returncode}: {ended.stderr}")
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slowest", type=int, default=5)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        paths = {name: write(Path(folder) / str(number)) for number, (name, write, _) in enumerate(cases())}
        try:
            rejection_seconds(next(iter(paths.values())))  # fills the page cache
            seconds = {name: rejection_seconds(path) for name, path in paths.items()}
        except BenchError as error:
            sys.exit(str(error))
    ordered = sorted(seconds, key=seconds.__getitem__)
    print(f"{len(ordered)} kinds, median {seconds[ordered[len(ordered) // 2]]:.2f} s")
    for name in ordered[-arguments.slowest :]:
        print(f"{seconds[name]:.2f} s  {name}")


if __name__ == "__main__":
    main()
