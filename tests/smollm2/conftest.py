"""These tests want a model of 98 MB: `make smollm2-test` downloads it and runs them. `make test` passes them over."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from loadtest.local_mesh import LocalMesh


def pytest_addoption(parser: pytest.Parser) -> None:
    """`make smollm2-test` sets it."""
    parser.addoption("--smollm2", metavar="DIR", type=Path, help="run the tests of the GGUF file in this folder")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Without it there is nothing here."""
    return True if not config.getoption("--smollm2", default=None) and collection_path.suffix == ".py" else None


@pytest.fixture(scope="session")
def gguf_file(request: pytest.FixtureRequest) -> Path:
    """The downloaded file."""
    (path,) = Path(request.config.getoption("--smollm2")).glob("*.gguf")
    return path


@pytest.fixture(scope="session")
def checkpoint(gguf_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `weft convert` makes of it."""
    out = tmp_path_factory.mktemp("smollm2") / "smollm2"
    subprocess.run([sys.executable, "-m", "weft.cli.main", "convert", str(gguf_file), str(out)], check=True)
    return out


@pytest.fixture(scope="session")
def oracle(checkpoint: Path) -> Any:
    """transformers, in float32, on the converted weights."""
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    return model.eval()


@pytest.fixture(scope="session")
def mesh(checkpoint: Path) -> Iterator[LocalMesh]:
    """`weft up`, prefill and decode apart."""
    with LocalMesh(str(checkpoint), num_prefill=1, num_decode=1) as running:
        yield running
