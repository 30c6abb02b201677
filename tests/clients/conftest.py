"""These tests want clients that Weft itself does not need: `make client-test` installs them and asks for them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.clients.scene import Door, Scene, scene
from tests.mesh.conftest import Mesh
from weft.api_keys import ApiKey, digest_of, dump_keys, make_secret

GATEWAYS = {"front", "whole_mesh"}


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
        if here in item.path.parents and GATEWAYS & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.skip(reason="`make client-test` installs these clients, and runs them"))


@pytest_asyncio.fixture
async def front(tmp_path: Path) -> AsyncIterator[Scene]:
    """A gateway to talk to."""
    async with scene(tmp_path) as made:
        yield made


@pytest.fixture(scope="session")
def whole_mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Mesh, Door]]:
    """`weft up` with weft-nano, keys and two gateways, every service a process of its own, and how clients get in."""
    folder, secret = tmp_path_factory.mktemp("mesh"), make_secret()
    keys = folder / "keys.json"
    keys.write_text(dump_keys([ApiKey("tester", digest_of(secret))]))
    timeline = folder / "start.svg"
    options = ["--both", "1", "--gateways", "2", "--weight-format", "packed12", "--timeline", str(timeline)]
    mesh = Mesh("--keys", str(keys), "--prefill", "1", "--decode", "1", *options)
    try:
        mesh.wait_ready()
        yield mesh, Door(mesh.url, secret, folder)
    finally:
        mesh.stop()
    assert timeline.read_text().startswith("<svg")
