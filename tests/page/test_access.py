"""The page for those who come by keyboard, by ear, on a small screen or over a bad line."""

from __future__ import annotations

from typing import Any

import pytest

from tests.page.scene import Scene, tick
from tests.page.test_page import WAIT_MS, visit
from tests.services.gateway.conftest import MODEL_NAME
from weft_mesh.v1 import common_pb2
from weft_mesh.v1 import scheduler_service_pb2 as pb

pytestmark = pytest.mark.timeout(240)
FOCUS = "[document.activeElement.className, document.activeElement.closest('.worker')?.dataset.worker]"


async def look(page: Any, shown: Scene, second: int) -> None:
    """A picture of the mesh reaches the page."""
    tick(shown.scheduler, second)
    before = await page.inner_text("#totals")
    await shown.gateway.watch.poll()
    await page.wait_for_function("before => document.getElementById('totals').innerText !== before", arg=before)


async def test_the_focus_stays_on_a_button_while_another_worker_loads(browser: Any, shown: Scene) -> None:
    loading = pb.WorkerArrival(worker_id="decode-7", role=common_pb2.WORKER_ROLE_DECODE, model=MODEL_NAME)
    async with visit(browser, shown) as page:
        await page.focus("[data-worker=decode-1] .drain")
        for second in range(3):
            loading.phase, loading.since_ms = "reading weights", 1000 * second
            shown.scheduler.arrivals = [loading]
            await look(page, shown, second)
            assert await page.evaluate(FOCUS) == ["drain", "decode-1"]
        shown.scheduler.arrivals = []
        await look(page, shown, 3)
        await page.wait_for_selector("[data-worker=decode-7]", state="detached", timeout=WAIT_MS)
        assert await page.evaluate(FOCUS) == ["drain", "decode-1"]


async def test_the_focus_goes_with_a_worker_to_its_other_side(browser: Any, shown: Scene) -> None:
    async with visit(browser, shown) as page:
        # Arrows, not the first letters: letters typed within a second of each other count as one word.
        for key, side in (("ArrowUp", "prefill"), ("ArrowDown", "decode")):
            await page.focus("[data-worker=decode-1] .role")
            await page.keyboard.press(key)
            await page.wait_for_selector(f"#{side} [data-worker=decode-1]", timeout=WAIT_MS)
            assert await page.evaluate(FOCUS) == ["role", "decode-1"]


async def test_the_state_is_told_when_it_changes_and_not_with_every_picture(browser: Any, shown: Scene) -> None:
    watch = """() => {
      const told = (window.told = []);
      const state = document.getElementById("state");
      const tell = () => told.push(state.textContent.trim());
      new MutationObserver(tell).observe(state, { childList: true, subtree: true });
    }"""
    async with visit(browser, shown) as page:
        await page.evaluate(watch)
        for second in range(3):
            await look(page, shown, second)
        assert await page.evaluate("window.told") == []
        await shown.scheduler.kill()
        for _ in range(2):
            await shown.gateway.watch.poll()
        await page.wait_for_selector(".state.bad", timeout=WAIT_MS)
        assert len(await page.evaluate("window.told")) == 1


@pytest.mark.parametrize("width", [320, 390, 1024])
async def test_every_figure_of_the_mesh_is_whole_on_a_phone_and_a_tablet(
    browser: Any, shown: Scene, width: int
) -> None:
    cut = "all => all.filter(it => it.scrollWidth > it.clientWidth).map(it => it.textContent)"
    async with visit(browser, shown, viewport={"width": width, "height": 768}) as page:
        if await page.is_visible("[data-show=mesh]"):
            await page.click("[data-show=mesh]")
        for second in range(2):
            await look(page, shown, second)
        assert await page.locator(".lines dt, .lines dd").evaluate_all(cut) == []
        assert await page.locator(".totals > div, .totals dd, .mesh").evaluate_all(cut) == []


async def test_who_comes_by_keyboard_sees_where_they_are(browser: Any, shown: Scene) -> None:
    async with visit(browser, shown) as page:
        unseen, places = [], set()
        for _ in range(30):
            await page.keyboard.press("Tab")
            place, outline = await page.evaluate(
                "(e => [e.id || e.className, getComputedStyle(e).outlineStyle])(document.activeElement)"
            )
            places.add(place)
            if outline == "none" and place:
                unseen.append(place)
        assert {"scroll", "prompt", "drain"} <= places
        assert unseen == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_what_is_written_on_a_timeline_can_be_read(browser: Any, shown: Scene, scheme: str) -> None:
    """As WCAG has it: 4.5 to 1 for small text."""
    contrast = """() => {
      const light = (colour) => {
        const linear = (n) => (n <= 0.03928 ? n / 12.92 : ((n + 0.055) / 1.055) ** 2.4);
        const [r, g, b] = colour.match(/[\\d.]+/g).map((n) => linear(n / 255));
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
      };
      return ["front", "wait", "prefill", "decode"].map((kind) => {
        const bar = document.querySelector(".track").appendChild(document.createElement("span"));
        bar.className = `bar ${kind}`;
        const style = getComputedStyle(bar);
        const [dim, bright] = [light(style.color), light(style.backgroundColor)].sort((a, b) => a - b);
        return (bright + 0.05) / (dim + 0.05);
      });
    }"""
    async with visit(browser, shown, color_scheme=scheme) as page:
        await page.fill("#prompt", "hello world")
        await page.keyboard.press("Enter")
        await page.wait_for_selector(".account", timeout=WAIT_MS)
        assert min(await page.evaluate(contrast)) >= 4.5


async def test_a_gateway_that_is_away_is_called_that(browser: Any, shown: Scene) -> None:
    page = await browser.new_page()  # whose console complains, too
    await page.goto(shown.url)
    await page.wait_for_selector(".state.ready", timeout=WAIT_MS)
    await page.route("**/v1/chat/completions", lambda route: route.abort("connectionrefused"))
    await page.route("**/weft/workers/**", lambda route: route.abort("connectionrefused"))
    await page.fill("#prompt", "hello")
    await page.keyboard.press("Enter")
    await page.wait_for_selector("#trouble:has-text('is the mesh running?')", timeout=WAIT_MS)
    assert await page.input_value("#prompt") == "hello"
    await page.click("[data-worker=decode-1] .drain")
    await page.wait_for_selector("#mesh-trouble:has-text('is the mesh running?')", timeout=WAIT_MS)
    await page.close()
