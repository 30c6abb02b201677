"""These tests want a browser: `make page-test` installs one and asks for them. `make test` passes them over."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.page.scene import Scene, scene


def pytest_addoption(parser: pytest.Parser) -> None:
    """`make page-test` sets it."""
    parser.addoption("--browser", action="store_true", help="run the tests of the page in headless Chromium")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Without it there is nothing here."""
    return True if not config.getoption("--browser", default=False) and collection_path.suffix == ".py" else None


@pytest_asyncio.fixture
async def shown(tmp_path: Path) -> AsyncIterator[Scene]:
    """A page to look at."""
    async with scene(tmp_path) as made:
        yield made


@pytest_asyncio.fixture
async def browser() -> AsyncIterator[Any]:
    """Headless Chromium."""
    from playwright.async_api import async_playwright

    async with async_playwright() as playwright:
        # containers give Chromium's own sandbox no room
        chromium = await playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        yield chromium
        await chromium.close()
