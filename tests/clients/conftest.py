"""These tests want clients that Weft itself does not need: `make client-test` installs them and asks for them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.clients.scene import Scene, scene


def pytest_addoption(parser: pytest.Parser) -> None:
    """`make client-test` sets it."""
    parser.addoption("--clients", action="store_true", help="run the clients that `make client-test` installs")
    parser.addoption("--examples", type=int, help="requests of each kind that Schemathesis makes up; the usual is few")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """`make test` passes them over: a machine that runs Weft need not have node."""
    if config.getoption("--clients", default=False):
        return
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents and "front" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.skip(reason="`make client-test` installs these clients, and runs them"))


@pytest_asyncio.fixture
async def front(tmp_path: Path) -> AsyncIterator[Scene]:
    """A gateway to talk to."""
    async with scene(tmp_path) as made:
        yield made
