"""The page of a gateway that asks for keys: what a visitor sees who types one, and then another."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.page.scene import Scene, scene
from tests.page.test_page import WAIT_MS
from weft.api_keys import ApiKey, digest_of, dump_keys

USER, OPERATOR = "sk-weft-user", "sk-weft-operator"
pytestmark = pytest.mark.timeout(240)


@pytest_asyncio.fixture
async def keyed(tmp_path: Path) -> AsyncIterator[Scene]:
    """A page that is shown the mesh by one of two keys."""
    keys = [ApiKey("alice", digest_of(USER)), ApiKey("ops", digest_of(OPERATOR), operator=True)]
    (tmp_path / "keys.json").write_text(dump_keys(keys))
    async with scene(tmp_path, keys=str(tmp_path / "keys.json")) as made:
        yield made


async def give(page: Any, key: str) -> None:
    """As somebody types it."""
    await page.fill("#key", key)
    await page.keyboard.press("Tab")


async def is_refused(page: Any, says: str, why: str) -> None:
    """Until the page says so."""
    await page.wait_for_selector(f"#state:has-text('{says}')", timeout=WAIT_MS)
    await page.wait_for_selector(f"#mesh-trouble:has-text('{why}')", timeout=WAIT_MS)


# the pauses of a gateway that is away, made as long as a visitor's patience
ENDLESS = """
const soon = window.setTimeout;
window.setTimeout = (call, ms, ...rest) => soon(call, ms >= 500 && ms <= 4000 ? 1e9 : ms, ...rest);
"""


async def test_a_key_counts_at_once_also_after_a_wrong_one(browser: Any, keyed: Scene) -> None:
    page = await browser.new_page()
    await page.add_init_script(ENDLESS)
    await page.goto(keyed.url)
    await is_refused(page, "enter an API key", "no API key")
    await give(page, "sk-weft-wrong")
    await is_refused(page, "enter an API key", "Incorrect API key")
    await give(page, USER)
    await is_refused(page, "the map is for operators", "operator")
    await page.wait_for_selector("#model option", state="attached", timeout=WAIT_MS)
    await page.close()


async def test_with_another_key_the_page_shows_what_that_one_may_see(browser: Any, keyed: Scene) -> None:
    page = await browser.new_page()
    await page.goto(keyed.url)
    await is_refused(page, "enter an API key", "no API key")
    await give(page, OPERATOR)
    await page.wait_for_selector(".state.ready", timeout=WAIT_MS)
    await page.wait_for_selector("[data-worker=decode-1] .drain", state="attached", timeout=WAIT_MS)
    await give(page, USER)
    await is_refused(page, "the map is for operators", "operator")
    await page.close()


# as if the visitor were in another tab, and back
AWAY = """
(isAway) => {
  Object.defineProperty(document, "hidden", { value: isAway, configurable: true });
  document.dispatchEvent(new Event("visibilitychange"));
}
"""


async def test_a_key_that_is_fetched_from_another_tab_counts(browser: Any, keyed: Scene) -> None:
    page = await browser.new_page()
    await page.goto(keyed.url)
    await is_refused(page, "enter an API key", "no API key")
    for is_away in (True, False):
        await page.evaluate(AWAY, is_away)
    await give(page, OPERATOR)
    await page.wait_for_selector(".state.ready", timeout=WAIT_MS)
    await page.close()
