"""Agents of other people against a gateway and a scripted model: `make agents` installs them and asks for these tests.
`make test` passes them over."""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from tokenizers import Tokenizer

from tests.agents.scripted import NANO, ScriptedModel, scripted_gateway


def pytest_addoption(parser: pytest.Parser) -> None:
    """`make agents` sets it."""
    parser.addoption("--agents", metavar="DIR", help="run the agents that npm has installed in this folder")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Without it there is nothing here."""
    return True if not config.getoption("--agents", default=None) and collection_path.suffix == ".py" else None


@pytest.fixture(scope="session")
def long_context_nano(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """weft-nano's tokenizer and template with room for what agents say first; nobody here reads its weights."""
    path = tmp_path_factory.mktemp("models") / "nano"
    path.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(NANO / name, path)
    config = json.loads((NANO / "config.json").read_text()) | {"max_position_embeddings": 1 << 18}
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest_asyncio.fixture
async def model(long_context_nano: Path) -> AsyncIterator[ScriptedModel]:
    """A mesh of one gateway whose model does as it is told."""
    tokenizer = Tokenizer.from_file(str(long_context_nano / "tokenizer.json"))
    async with scripted_gateway(long_context_nano, tokenizer) as scripted:
        yield scripted
