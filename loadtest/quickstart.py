"""The README's quickstart as a new user runs it, timed from `git clone` to the first streamed token.

    python -m loadtest.quickstart [--log FILE]

Clones this repository as it is committed, runs `make serve` there, and asks as soon as it answers. The network and
pip's cache are part of the figure, and so is building the C++ kernels, which the clone does itself.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx

from loadtest.processes import ROOT, BenchError, Processes, answers
from weft.cli.layout import free_ports

INSTALL_SECONDS = 1800.0
MARK = ".venv/.installed-run"
# a new user has nothing of this checkout
UNSET = ("env", "-u", "PYTHONPATH", "-u", "VIRTUAL_ENV")


def first_token(url: str) -> None:
    """Stream the README's question up to the first text. Raises BenchError when there is none."""
    body = {"model": "weft-nano", "messages": [{"role": "user", "content": "Who are you?"}], "stream": True}
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=60) as response:
        for line in response.iter_lines():
            if '"content":"' in line and '"content":""' not in line:
                return
    raise BenchError("the stream ended without a token")


def run(folder: Path, log_path: Path) -> None:
    """Print each step when it is reached. Raises BenchError."""
    began = time.monotonic()
    clone, (port, grpc_port) = folder / "weft", free_ports(2)

    def note(step: str) -> None:
        print(f"| {step} | {time.monotonic() - began:.1f} s |", flush=True)

    print("| from the beginning | |\n| --- | --- |")
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
    note("git clone")
    with Processes(log_path) as processes:
        command = [*UNSET, "make", "serve", f"PORT={port}", f"ARGS=--grpc-port {grpc_port}"]
        # nor are its kernels in the cache
        processes.start(command, {"WEFT_KERNEL_CACHE": str(folder / "kernels")}, folder=clone)
        processes.wait("make serve", (clone / MARK).exists, INSTALL_SECONDS)
        note("make serve: installed")
        processes.wait("the mesh", answers(port, "/ready"))
        note("the mesh is ready")
        first_token(f"http://127.0.0.1:{port}")
        note("the first streamed token")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--log", type=Path, help="a file for the output of `make serve`")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="weft-quickstart-") as folder:
        try:
            run(Path(folder), options.log or Path(folder) / "log")
        except BenchError as error:
            sys.exit(f"quickstart: {error}")


if __name__ == "__main__":
    main()
