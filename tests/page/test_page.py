"""What a visitor sees and does: an answer and its account, the map, an operator's buttons, on a desk and a phone."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.page.scene import ANSWER, TOKENIZER, Scene, answer, tick
from tests.services.gateway.conftest import MODEL_NAME
from tests.services.gateway.fakes import speaking
from weft_mesh.v1 import common_pb2
from weft_mesh.v1 import scheduler_service_pb2 as pb

PHONE = {"width": 390, "height": 844}
DESK = {"width": 1360, "height": 850}
WAIT_MS = 60_000
pytestmark = pytest.mark.timeout(240)


@asynccontextmanager
async def visit(browser: Any, shown: Scene, **options: Any) -> AsyncIterator[Any]:
    """The page once it is connected. Nothing may be complained of, and nothing asked of another host."""
    page = await browser.new_page(**{"viewport": DESK, **options})
    page.set_default_timeout(WAIT_MS)
    troubles: list[str] = []
    page.on("console", lambda message: troubles.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: troubles.append(str(error)))
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    await page.goto(shown.url)
    await page.wait_for_selector(".state.ready", timeout=WAIT_MS)
    await page.wait_for_selector("#model option", state="attached", timeout=WAIT_MS)
    yield page
    assert troubles == []
    assert {urlsplit(url).netloc for url in asked} == {urlsplit(shown.url).netloc}
    await page.close()


async def test_an_answer_comes_with_its_account(browser: Any, shown: Scene) -> None:
    async with visit(browser, shown) as page:
        await page.keyboard.type("hello world, hello world")  # the field has the focus
        await page.keyboard.press("Enter")
        await page.wait_for_selector(".account", timeout=WAIT_MS)
        text = (await page.inner_text(".assistant .text")).strip()
        assert ANSWER.startswith(text)
        assert len(text) > 0.9 * len(ANSWER), "its last word's full stop is no token of the tiny tokenizer"
        figures = (await page.inner_text(".figures")).split("\n")
        told = dict(zip(figures[::2], figures[1::2], strict=True))
        assert told["workers"] == "prefill-0 → decode-0"
        assert told["KV moved"] == "1.3 MiB"
        assert float(told["first token"].split()[0]) > 40
        lanes = await page.locator(".lanes .name").all_inner_texts()
        assert lanes == ["gateway", "prefill-0", "KV pull", "decode-0"]
        bar = await page.locator(".bar.prefill").bounding_box()
        pull = await page.locator(".bar.move").bounding_box()
        assert bar["x"] + bar["width"] == pytest.approx(pull["x"], abs=2), "the pull begins where computing ends"
        await page.wait_for_selector('path[data-thread="prefill-0 decode-0"]', state="attached", timeout=WAIT_MS)


async def test_escape_stops_an_answer_and_the_next_can_be_asked(browser: Any, shown: Scene) -> None:
    decode = shown.scheduler.decoders[0]
    decode.script = speaking(TOKENIZER.encode("the answer is").ids, finish=None)  # and then falls silent
    async with visit(browser, shown) as page:
        await page.fill("#prompt", "hello")
        await page.keyboard.press("Enter")
        await page.wait_for_selector(".assistant .text:has-text('the answer is')", timeout=WAIT_MS)
        await page.keyboard.press("Escape")
        await page.wait_for_selector("#send:has-text('Send')")
        await decode.until(lambda: bool(decode.cancelled))
        decode.script = answer
        await page.click("#clear")
        await page.fill("#prompt", "again")
        await page.keyboard.press("Enter")
        await page.wait_for_selector(".account", timeout=WAIT_MS)


async def test_the_map_shows_the_fleet_and_its_speed(browser: Any, shown: Scene) -> None:
    async with visit(browser, shown) as page:
        for second in range(3):
            tick(shown.scheduler, second)
            await shown.gateway.watch.poll()
            await page.wait_for_timeout(250)
        assert await page.locator(".worker .id").all_inner_texts() == ["prefill-0", "decode-0", "decode-1"]
        assert "611 MiB of 1.0 GiB" in await page.inner_text("#store")
        assert "67 %" in await page.inner_text("#totals")
        assert (await page.inner_text("#totals")).split("\n")[1] != "0 tok/s"
        assert await page.locator("path[data-thread]").count() == 2


async def test_a_worker_that_loads_is_on_the_map_until_it_joins(browser: Any, shown: Scene) -> None:
    loading = pb.WorkerArrival(worker_id="decode-7", role=common_pb2.WORKER_ROLE_DECODE, model=MODEL_NAME)
    loading.phase, loading.done_bytes, loading.total_bytes, loading.since_ms = "reading weights", 43, 100, 2900
    async with visit(browser, shown) as page:
        shown.scheduler.arrivals = [loading]
        await shown.gateway.watch.poll()
        await page.wait_for_selector("#decode [data-worker=decode-7].arriving", timeout=WAIT_MS)
        assert "reading weights 43 %, 3 s" in await page.inner_text("[data-worker=decode-7]")
        assert await page.locator("#decode .worker .id").all_inner_texts() == ["decode-0", "decode-1", "decode-7"]
        shown.scheduler.arrivals = []
        await shown.gateway.watch.poll()
        await page.wait_for_selector("[data-worker=decode-7]", state="detached", timeout=WAIT_MS)


async def test_an_operator_drains_a_worker_by_keyboard(browser: Any, shown: Scene) -> None:
    async with visit(browser, shown) as page:
        await page.focus("[data-worker=decode-1] .drain")
        await page.keyboard.press("Enter")
        await page.wait_for_selector("[data-worker=decode-1].draining", timeout=WAIT_MS)
        assert shown.scheduler.draining == {"decode-1"}
        await page.get_by_role("button", name="undrain decode-1").click()
        await page.wait_for_selector("[data-worker=decode-1]:not(.draining)", timeout=WAIT_MS)
        assert shown.scheduler.draining == set()


async def test_an_operator_gives_a_worker_another_role(browser: Any, shown: Scene) -> None:
    async with visit(browser, shown) as page:
        assert not await page.is_visible("[data-worker=prefill-0] .role"), "it has one role only"
        await page.get_by_label("role of decode-1").select_option("prefill")
        await page.wait_for_selector("#prefill [data-worker=decode-1]", timeout=WAIT_MS)
        assert await page.locator("#decode .worker .id").all_inner_texts() == ["decode-0"]


async def test_a_phone_shows_one_view_at_a_time_and_nothing_sticks_out(browser: Any, shown: Scene) -> None:
    async with visit(browser, shown, viewport=PHONE) as page:
        await page.fill("#prompt", "hello " * 30 + "x" * 200)
        await page.keyboard.press("Enter")
        await page.wait_for_selector(".account", timeout=WAIT_MS)
        assert not await page.is_visible(".mesh")
        await page.click("text=Mesh")
        assert await page.is_visible(".worker")
        assert not await page.is_visible("#composer")
        for view in ("mesh", "chat"):
            await page.click(f"[data-show={view}]")
            assert await page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]


async def test_a_small_screen_shows_every_figure_of_a_worker_whole(browser: Any, shown: Scene) -> None:
    async with visit(browser, shown, viewport={"width": 1200, "height": 800}) as page:
        await page.wait_for_selector(".lines dd", timeout=WAIT_MS)
        cut = "all => all.filter(it => it.scrollWidth > it.clientWidth).map(it => it.textContent)"
        assert await page.locator(".lines dt, .lines dd").evaluate_all(cut) == []


async def test_dark_is_dark(browser: Any, shown: Scene) -> None:
    colours = {}
    for scheme in ("light", "dark"):
        async with visit(browser, shown, color_scheme=scheme) as page:
            found = await page.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)")
            colours[scheme] = sum(found)
    assert colours["light"] > 700
    assert colours["dark"] < 100


async def test_a_tool_call_is_answered_in_the_page(browser: Any, shown: Scene) -> None:
    bodies: list[dict[str, Any]] = []

    async def speak(route: Any) -> None:
        bodies.append(json.loads(route.request.post_data))
        call = {"index": 0, "id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": ""}}
        more = {"index": 0, "function": {"arguments": '{"city": "Oslo"}'}}
        deltas = [{"tool_calls": [call]}, {"tool_calls": [more]}] if len(bodies) == 1 else [{"content": "Cold."}]
        frames = [f"data: {json.dumps({'choices': [{'index': 0, 'delta': delta}]})}\n\n" for delta in deltas]
        await route.fulfill(content_type="text/event-stream", body="".join([*frames, "data: [DONE]\n\n"]))

    async with visit(browser, shown) as page:
        await page.route("**/v1/chat/completions", speak)
        await page.click("text=What is the weather in Oslo?")
        assert await page.inner_text(".call code") == 'get_weather({"city": "Oslo"})'
        await page.fill(".reply input", "3 degrees")
        await page.keyboard.press("Enter")
        await page.wait_for_selector("text=Cold.")
        assert bodies[0]["tools"][0]["function"]["name"] == "get_weather"
        assert bodies[1]["messages"][1]["tool_calls"][0]["id"] == "call_1"
        assert bodies[1]["messages"][2] == {"role": "tool", "tool_call_id": "call_1", "content": "3 degrees"}


async def test_what_goes_wrong_is_said(browser: Any, shown: Scene) -> None:
    async with visit(browser, shown) as page:
        await page.click("summary")
        await page.fill("#tools", "{")
        await page.fill("#prompt", "hello")
        await page.keyboard.press("Enter")
        assert (await page.inner_text("#trouble")).startswith("Tools: ")
        assert await page.input_value("#prompt") == "hello", "it may be asked again"
        assert await page.locator("#talk li").count() == 0


async def test_a_question_that_is_refused_is_back_in_its_field(browser: Any, shown: Scene) -> None:
    async def refuse(route: Any) -> None:
        await route.fulfill(
            status=200, content_type="text/event-stream", body='data: {"error": {"message": "no room"}}\n\n'
        )

    async with visit(browser, shown) as page:
        await page.route("**/v1/chat/completions", refuse)
        await page.fill("#prompt", "hello")
        await page.keyboard.press("Enter")
        await page.wait_for_selector("#trouble:has-text('no room')")
        assert await page.input_value("#prompt") == "hello"
        assert await page.locator("#talk li").count() == 0


async def test_a_conversation_that_is_cleared_in_the_midst_of_an_answer_keeps_nothing_of_it(
    browser: Any, shown: Scene
) -> None:
    bodies: list[dict[str, Any]] = []
    decode = shown.scheduler.decoders[0]
    decode.script = speaking(TOKENIZER.encode("the answer is").ids, finish=None)
    async with visit(browser, shown) as page:
        page.on("request", lambda request: bodies.append(json.loads(request.post_data)) if request.post_data else None)
        await page.fill("#prompt", "one")
        await page.keyboard.press("Enter")
        await page.wait_for_selector(".assistant .text:has-text('the answer is')", timeout=WAIT_MS)
        await page.click("#clear")
        decode.script = answer
        await page.fill("#prompt", "two")
        await page.keyboard.press("Enter")
        await page.wait_for_selector(".account", timeout=WAIT_MS)
        assert await page.locator("#talk li").count() == 2
    assert [each["messages"] for each in bodies] == [[{"role": "user", "content": text}] for text in ("one", "two")]


async def test_settings_are_no_part_of_the_question(browser: Any, shown: Scene) -> None:
    async with visit(browser, shown) as page:
        await page.click("summary")
        await page.fill("#prompt", "half a question")
        await page.fill("#temperature", "0.75")
        await page.keyboard.press("Enter")
        assert await page.locator("#talk li").count() == 0, "Enter in a setting sends nothing"
        await page.focus("#prompt")
        await page.keyboard.press("Enter")
        await page.wait_for_selector(".account", timeout=WAIT_MS)


async def test_an_answer_that_was_cut_off_says_so(browser: Any, shown: Scene) -> None:
    async def speak(route: Any) -> None:
        frame = {"choices": [{"index": 0, "delta": {"content": "Once upon"}, "finish_reason": "length"}]}
        await route.fulfill(content_type="text/event-stream", body=f"data: {json.dumps(frame)}\n\ndata: [DONE]\n\n")

    async with visit(browser, shown) as page:
        await page.route("**/v1/chat/completions", speak)
        await page.fill("#prompt", "hello")
        await page.keyboard.press("Enter")
        await page.wait_for_selector(".assistant .note:has-text('Cut off')")


async def test_a_mesh_that_loses_its_scheduler_is_not_shown_as_ready(browser: Any, shown: Scene) -> None:
    async with visit(browser, shown) as page:
        await shown.scheduler.kill()
        for _ in range(2):
            await shown.gateway.watch.poll()
        await page.wait_for_selector(".state.bad", timeout=WAIT_MS)


async def test_an_answer_format_is_asked_for_by_its_schema(browser: Any, shown: Scene) -> None:
    bodies: list[dict[str, Any]] = []

    async def speak(route: Any) -> None:
        bodies.append(json.loads(route.request.post_data))
        frame = {"choices": [{"index": 0, "delta": {"content": "{}"}}]}
        await route.fulfill(content_type="text/event-stream", body=f"data: {json.dumps(frame)}\n\ndata: [DONE]\n\n")

    async with visit(browser, shown) as page:
        await page.route("**/v1/chat/completions", speak)
        await page.click("summary")
        await page.click("#schema-example")
        assert "answer format" in await page.inner_text("#summary")
        await page.fill("#prompt", "hello")
        await page.keyboard.press("Enter")
        await page.wait_for_selector(".assistant .text:has-text('{}')")
    asked = bodies[0]["response_format"]
    assert (asked["type"], asked["json_schema"]["schema"]["required"]) == ("json_schema", ["name", "age", "likes"])


async def test_accepted_drafts_are_shaded_and_explained(browser: Any, shown: Scene) -> None:
    bodies: list[dict[str, Any]] = []
    pieces = [
        ("See **two", False), (" bold** words", True), (" and `code`.\n\n", False), ("1. one\n2. t", True),
        ("wo\n\n```py\n", False), ("x = 1\n", True), ("y = 2\n```\n\n> quoted\n> ", False), ("text", True),
    ]  # fmt: skip

    async def speak(route: Any) -> None:
        bodies.append(json.loads(route.request.post_data))
        mark = {True: {"is_draft": True}, False: {}}
        choices = [{"index": 0, "delta": {"content": text}, **mark[is_draft]} for text, is_draft in pieces]
        thought = {"index": 0, "delta": {"reasoning_content": "Hm."}, "is_draft": True}
        frames = [f"data: {json.dumps({'choices': [choice]})}\n\n" for choice in (thought, *choices)]
        told = f"event: weft.timeline\ndata: {json.dumps(timeline)}\n\ndata: [DONE]\n\n"
        await route.fulfill(content_type="text/event-stream", body="".join([*frames, told]))

    tokens = {"prompt": 9, "cached": 0, "from_store": 0, "completion": 30, "drafted": 15, "accepted": 12}
    timeline = {
        "elapsed_ms": {"prepared": 1, "routed": 2, "first_token": 9, "last_token": 30, "end": 31},
        "workers": {"prefill": "decode-0", "decode": "decode-0"}, "num_attempts": 1, "route": {"waited_ms": 0},
        "decode_stages_ms": {"routed": 0, "reserved": 0, "prefilling": 5, "transferring": 0},
        "prefill": {"queue_ms": 0, "compute_ms": 5}, "transfer": {"bytes": 0}, "tokens": tokens, "itl_ms": {"mean": 1},
    }  # fmt: skip
    async with visit(browser, shown) as page:
        await page.route("**/v1/chat/completions", speak)
        await page.fill("#prompt", "hello")
        await page.keyboard.press("Enter")
        await page.wait_for_selector(".account", timeout=WAIT_MS)
        marks = await page.locator(".text .draft").all_text_contents()
        assert marks == ["Hm.", " bold", " words", "one", "t", "x = 1\n", "text"]
        assert "drafts accepted\n12 of 15" in await page.inner_text(".figures")
        assert "Shaded text comes from drafts" in await page.inner_text(".account")
    assert bodies[0]["stream_options"] == {"include_draft_tokens": True}


async def test_answer_without_drafts_has_no_legend(browser: Any, shown: Scene) -> None:
    async with visit(browser, shown) as page:
        await page.fill("#prompt", "hello")
        await page.keyboard.press("Enter")
        await page.wait_for_selector(".account", timeout=WAIT_MS)
        assert await page.locator(".draft").count() == 0
        assert "drafts" not in await page.inner_text(".account")
