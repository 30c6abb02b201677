"""`python -m loadtest.quickstart`: what a new user does, timed from `git clone` to the first streamed token.

Clones this repository as it is committed, runs README's `make serve` there, and asks as soon as anybody answers. Pip
installs from wherever it is told to look, so the network and its cache are part of the figure; so is building the C++
kernels, which the clone has to do for itself. What is reached is printed when it is reached; `--log FILE` keeps what
`make serve` says.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import httpx

from weft.cli.ports import free_ports

ROOT = Path(__file__).resolve().parents[1]
INSTALL_SECONDS, START_SECONDS, STOP_SECONDS = 1800.0, 180.0, 60.0
MARK = ".venv/.installed-run"


class Broken(Exception):
    """The quickstart does not lead to a token."""


def wait(what: str, is_there: Callable[[], bool], serving: subprocess.Popen[bytes], seconds: float) -> None:
    """Until it is. Raises Broken when it cannot come any more, or takes too long."""
    deadline = time.monotonic() + seconds
    while not is_there():
        if serving.poll() is not None or time.monotonic() > deadline:
            raise Broken(what)
        time.sleep(0.2)


def is_ready(url: str) -> bool:
    """Somebody answers, and is ready."""
    try:
        return httpx.get(f"{url}/ready", timeout=5).status_code == httpx.codes.OK
    except httpx.TransportError:
        return False


def first_token(url: str) -> str:
    """README's question, streamed up to the first text."""
    body = {"model": "weft-nano", "messages": [{"role": "user", "content": "Who are you?"}], "stream": True}
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=60) as response:
        for line in response.iter_lines():
            if '"content":"' in line and '"content":""' not in line:
                return line
    raise Broken("the stream ended without a token")


def stop(serving: subprocess.Popen[bytes]) -> None:
    """As Ctrl-C does it; what does not listen to that is killed."""
    for number in (signal.SIGINT, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(serving.pid, number)
            serving.wait(STOP_SECONDS)
            return


def environment(folder: Path) -> dict[str, str]:
    """As a new user has it: nothing of this checkout's, nor kernels that it has built."""
    inherited = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    return inherited | {"WEFT_KERNEL_CACHE": str(folder / "kernels")}


def run(folder: Path, log_file: Path) -> None:
    """Print what is reached, and when."""
    began = time.monotonic()
    clone, (port, grpc_port) = folder / "weft", free_ports(2)
    url = f"http://127.0.0.1:{port}"

    def note(what: str) -> None:
        print(f"| {what} | {time.monotonic() - began:.1f} s |", flush=True)

    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
    note("git clone")
    command = ["make", "serve", f"PORT={port}", f"ARGS=--grpc-port {grpc_port}"]
    with log_file.open("wb") as log:
        serving = subprocess.Popen(
            command, cwd=clone, env=environment(folder), stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        wait("not installed", (clone / MARK).exists, serving, INSTALL_SECONDS)
        note("make serve: installed")
        wait("the mesh is not ready", lambda: is_ready(url), serving, START_SECONDS)
        note("the mesh is ready")
        first_token(url)
        note("the first streamed token")
    except Broken as error:
        raise SystemExit(f"{error}\n{log_file.read_text()[-3000:]}") from error
    finally:
        stop(serving)


def main() -> None:
    """Do and print."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.quickstart", description=__doc__)
    parser.add_argument("--log", type=Path, help="where to keep what `make serve` says")
    options = parser.parse_args()
    print("| from the beginning | |\n| --- | --- |")
    with tempfile.TemporaryDirectory(prefix="weft-quickstart-") as folder:
        run(Path(folder), options.log or Path(folder) / "log")


if __name__ == "__main__":
    main()
