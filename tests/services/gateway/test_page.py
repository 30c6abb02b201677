"""What the page stands on, without a browser: its files, the fleet's events, the operator's calls, the timeline."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import anthropic
import httpx
import pytest

from tests.services.gateway.conftest import MODEL_NAME, Bench, MakeBench
from tests.services.gateway.fakes import deltas, speaking
from weft_mesh.v1 import scheduler_service_pb2 as pb
from weft_services.gateway.front import local_endpoints
from weft_services.gateway.front.fleet_endpoints import may_operate
from weft_services.gateway.mesh import fleet

MESSAGES = [{"role": "user", "content": "hello world, hello world, hello world"}]
WANTED = {"x-weft-timeline": "1"}


class Links(HTMLParser):
    """What a document loads, and what it does inline."""

    def __init__(self) -> None:
        super().__init__()
        self.urls: list[str] = []
        self.inline: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = dict(attrs)
        self.urls += [url for name in ("src", "href") if (url := named.get(name))]
        if tag == "style" or (tag == "script" and "src" not in named):
            self.inline.append(tag)
        self.inline += [name for name in named if name == "style" or name.startswith("on")]


async def test_the_page_is_whole_and_loads_nothing_from_elsewhere(bench: MakeBench) -> None:
    async with bench() as b:
        index = await b.http.get("/")
        assert index.headers["content-type"].startswith("text/html")
        links = Links()
        links.feed(index.text)
        assert links.inline == [], "the content security policy forbids it"
        waiting, seen = [url for url in links.urls if url != "/"], set[str]()
        while waiting:
            url = waiting.pop()
            assert url.startswith("/weft/page/"), url
            response = await b.http.get(url)
            assert (response.status_code, response.headers["x-content-type-options"]) == (200, "nosniff")
            assert response.headers["content-security-policy"].startswith("default-src 'self';")
            seen.add(url)
            if url.endswith(".js"):
                imported = [f"/weft/page/{name}" for name in re.findall(r'from "\./([\w.]+)"', response.text)]
                waiting += [other for other in imported if other not in seen]
        names = {path.name for path in local_endpoints.FOLDER.iterdir()}
        assert {Path(url).name for url in seen} == names - {local_endpoints.INDEX}


async def test_a_page_that_has_not_changed_is_not_sent_again(bench: MakeBench) -> None:
    async with bench() as b:
        tag = (await b.http.get("/weft/page/main.js")).headers["etag"]
        again = await b.http.get("/weft/page/main.js", headers={"if-none-match": tag})
        assert (again.status_code, again.content) == (304, b"")
        for name in ("nothing.js", "..%2Fpage.py", "%2e%2e"):
            assert (await b.http.get(f"/weft/page/{name}")).status_code == 404


async def events(response: httpx.Response) -> AsyncIterator[tuple[str, dict[str, Any]]]:
    """Server-sent events, parsed."""
    name = ""
    async for line in response.aiter_lines():
        if line.startswith("event: "):
            name = line[7:]
        elif line.startswith("data: "):
            yield name, json.loads(line[6:])


async def test_the_fleet_is_told_as_it_changes_and_hand_offs_when_they_happen(bench: MakeBench) -> None:
    async with bench() as b:
        report = pb.WorkerReport(ready=True, active_blocks=3, free_blocks=5, generated_tokens=70)
        report.hand_offs.add(prefill_worker_id="prefill-0", num_prompts=4, size_bytes=4096)
        b.scheduler.reports["decode-0"] = report
        b.scheduler.store = pb.StoreStatus(memory_bytes=100, memory_used_bytes=40)
        await b.gateway.watch.poll()
        known = b.gateway.watch.report.workers
        assert not any(worker.report.stats.transfers for worker in known), "nobody listens yet"
        b.decode.script = speaking([100, 101])
        async with b.http.stream("GET", "/weft/fleet/events") as response, asyncio.timeout(20):
            told = events(response)
            assert await anext(told) == ("hello", {"is_operator": True})
            name, fleet = await anext(told)
            assert (name, fleet["ready"], fleet["store"]["memory_used_bytes"]) == ("fleet", True, 40)
            worker = fleet["workers"][0]
            assert (worker["id"], worker["state"], worker["generated_tokens"]) == ("decode-0", "ready", 70)
            assert worker["blocks"] == {"total": 8, "active": 3, "cached": 0, "quarantined": 0, "free": 5}
            tally = {"prefill_worker_id": "prefill-0", "num_prompts": 4, "size_bytes": 4096, "num_failed": 0}
            assert worker["hand_offs"] == [tally]
            assert b.decode.address not in json.dumps(fleet)
            await b.client.chat.completions.create(model=MODEL_NAME, messages=MESSAGES)  # type: ignore[arg-type]
            while (event := await anext(told))[0] != "hand_off":
                assert event[0] == "fleet"
            assert event[1] == {"prefill": "prefill-0", "decode": "decode-0", "bytes": 0, "exposed_ms": 0}
            report.generated_tokens = 90
            while (event := await anext(told))[1]["workers"][0]["generated_tokens"] != 90:
                pass


async def test_listeners_are_bounded_and_leave_no_trace(bench: MakeBench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "MAX_SUBSCRIBERS", 1)
    async with bench() as b:
        request = b.http.build_request("GET", "/weft/fleet/events")
        async with asyncio.timeout(20):
            for _ in range(3):
                # the one before may still be leaving
                while (listening := await b.http.send(request, stream=True)).status_code == 429:
                    await listening.aclose()
                await anext(events(listening))
                refused = await b.http.get("/weft/fleet/events")
                assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
                await listening.aclose()


async def test_a_gateway_that_leaves_ends_the_stream_of_events(bench: MakeBench) -> None:
    async with bench(grace_seconds=20) as b:
        response = await b.http.send(b.http.build_request("GET", "/weft/fleet/events"), stream=True)
        await anext(events(response))
        loop = asyncio.get_running_loop()
        started = loop.time()
    assert loop.time() - started < 10, "it waited for its listener"


def test_a_slow_listener_loses_the_oldest_news() -> None:
    feed = fleet.Broadcaster[int]()
    with feed.subscribed() as listener:
        for item in range(fleet.MAX_UNREAD + 3):
            feed.publish(item)
        assert asyncio.run(listener.next()) == 3


async def test_an_operator_takes_a_worker_out_and_back(bench: MakeBench) -> None:
    async with bench() as b:
        for verb, is_draining in (("drain", True), ("drain", True), ("undrain", False)):
            response = await b.http.post(f"/weft/workers/decode-0/{verb}", json={})
            assert (response.status_code, response.json()["draining"]) == (200, is_draining)
            assert ("decode-0" in b.scheduler.draining) == is_draining
        missing = await b.http.post("/weft/workers/nobody/drain", json={})
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "worker_not_found")


async def test_a_sleeping_or_full_worker_is_told_from_one_that_is_not_ready(bench: MakeBench) -> None:
    async with bench() as b:
        b.scheduler.is_prefill_ready = False
        for report, state in (
            (pb.WorkerReport(), "not ready"),
            (pb.WorkerReport(asleep=True), "asleep"),
            (pb.WorkerReport(full=True), "full"),
        ):
            b.scheduler.reports["prefill-0"] = report
            await b.gateway.watch.poll()
            async with b.http.stream("GET", "/weft/fleet/events") as response:
                told = events(response)
                await anext(told)
                workers = (await anext(told))[1]["workers"]
            assert {worker["id"]: worker["state"] for worker in workers}["prefill-0"] == state


async def test_an_operator_gives_a_worker_another_role(bench: MakeBench) -> None:
    async with bench() as b:
        b.scheduler.flexible = {"decode-0"}
        given = await b.http.post("/weft/workers/decode-0/role", json={"role": "both"})
        assert (given.status_code, given.json()) == (200, {"worker_id": "decode-0", "role": "both"})
        await b.gateway.watch.poll()
        async with b.http.stream("GET", "/weft/fleet/events") as response:
            told = events(response)
            await anext(told)
            workers = (await anext(told))[1]["workers"]
        assert [(w["id"], w["role"], w["can_change_role"]) for w in workers] == [
            ("decode-0", "both", True),
            ("prefill-0", "prefill", False),
        ]
        for body, param in (({"role": "king"}, "role"), ({}, "role"), ([], None)):
            refused = await b.http.post("/weft/workers/decode-0/role", json=body)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, param), body
        fixed = await b.http.post("/weft/workers/prefill-0/role", json={"role": "decode"})
        assert fixed.status_code == 400
        assert "one role only" in fixed.json()["error"]["message"]
        far = await b.http.post("/weft/workers/decode-0/role", json={"role": "decode"}, headers={"via": "1.1 proxy"})
        assert far.status_code == 403
        assert list(b.scheduler.roles) == ["decode-0"]


@pytest.mark.parametrize(
    "headers",
    [
        {"host": "attacker.example:8000"},  # a name that was made to lead to loopback
        {"x-forwarded-for": "203.0.113.7"},
        {"forwarded": "for=203.0.113.7"},
    ],
)
async def test_whoever_is_not_at_the_machine_is_no_operator(bench: MakeBench, headers: dict[str, str]) -> None:
    async with bench() as b:
        refused = await b.http.post("/weft/workers/decode-0/drain", json={}, headers=headers)
        assert (refused.status_code, b.scheduler.draining) == (403, set())
        async with b.http.stream("GET", "/weft/fleet/events", headers=headers) as response:
            assert (await anext(events(response)))[1]["is_operator"] is False


async def test_behind_a_proxy_that_says_nothing_nobody_is_an_operator(bench: MakeBench) -> None:
    async with bench(allow_unauthenticated=True) as b:
        for verb in ("drain", "role"):
            refused = await b.http.post(f"/weft/workers/decode-0/{verb}", json={"role": "decode"})
            assert (refused.status_code, b.scheduler.draining, b.scheduler.roles) == (403, set(), {})
        async with b.http.stream("GET", "/weft/fleet/events") as response:
            assert (await anext(events(response)))[1]["is_operator"] is False


async def test_a_foreign_pages_form_cannot_drain(bench: MakeBench) -> None:
    async with bench() as b:
        for kind in ("text/plain", "application/x-www-form-urlencoded"):
            refused = await b.http.post("/weft/workers/decode-0/drain", content=b"{}", headers={"content-type": kind})
            assert (refused.status_code, b.scheduler.draining) == (415, set())


@pytest.mark.parametrize(("client", "expected"), [("127.0.0.1", True), ("::1", True), ("10.0.0.7", False), ("", False)])
def test_an_operator_calls_from_loopback(client: str, expected: bool) -> None:
    scope = {"client": (client, 5), "headers": [(b"host", b"[::1]:8000")]}
    assert may_operate(scope) is expected


def script_with_times(b: Bench) -> None:
    """Three tokens, with an account of the prompt."""

    async def script(start: Any) -> AsyncIterator[Any]:
        out = deltas(start, [100, 101, 102], cached=16)
        usage = out[0].prompt
        usage.transferred_bytes, usage.compute_ms, usage.exposed_transfer_ms = 4096, 12, 3
        usage.routed_us, usage.prefilling_us, usage.transferring_us = 500, 12_500, 3000
        for delta in out:
            yield delta
            await asyncio.sleep(0.002)

    b.decode.script = script


def check_timeline(told: dict[str, Any]) -> None:
    at = told["elapsed_ms"]
    assert 0 < at["prepared"] <= at["routed"] <= at["first_token"] <= at["last_token"] <= at["end"]
    assert told["workers"] == {"prefill": "prefill-0", "decode": "decode-0"}
    spent = {"routed": 0.5, "reserved": 0.0, "prefilling": 12.5, "transferring": 3.0}
    assert (told["decode_stages_ms"], told["transfer"]) == (spent, {"bytes": 4096, "exposed_ms": 3})
    assert (told["tokens"]["cached"], told["tokens"]["completion"]) == (16, 3)
    assert told["itl_ms"]["worst"] >= told["itl_ms"]["mean"] > 0


async def test_a_stream_has_a_timeline_for_those_who_ask(bench: MakeBench) -> None:
    async with bench() as b:
        script_with_times(b)
        create: Any = b.lenient.chat.completions.create  # which takes an event of ours for a chunk
        plain = [chunk async for chunk in await create(model=MODEL_NAME, messages=MESSAGES, stream=True)]
        assert all(chunk.object == "chat.completion.chunk" for chunk in plain)
        asked = await create(model=MODEL_NAME, messages=MESSAGES, stream=True, extra_headers=WANTED)
        chunks = [chunk async for chunk in asked]
        assert len(chunks) == len(plain) + 1
        told = chunks[-1].model_dump()
        assert (told["object"], told["choices"]) == ("weft.timeline", [])
        check_timeline(told)


async def test_a_whole_answer_has_it_in_a_header(bench: MakeBench) -> None:
    async with bench() as b:
        script_with_times(b)
        body = {"model": MODEL_NAME, "messages": MESSAGES}
        assert "x-weft-timeline" not in (await b.http.post("/v1/chat/completions", json=body)).headers
        for path, fields in (("chat/completions", body), ("messages", {**body, "max_tokens": 9})):
            response = await b.http.post(f"/v1/{path}", json=fields, headers=WANTED)
            check_timeline(json.loads(response.headers["x-weft-timeline"]))


async def test_anthropics_sdk_passes_over_the_timeline(bench: MakeBench) -> None:
    async with bench() as b, anthropic.AsyncAnthropic(base_url=b.url, api_key="none", max_retries=0) as client:
        script_with_times(b)
        stream = client.messages.stream(
            model=MODEL_NAME,
            max_tokens=9,
            messages=MESSAGES,  # type: ignore[arg-type]
            extra_headers=WANTED,
        )
        async with stream as answer:
            message = await answer.get_final_message()
        assert message.stop_reason == "end_turn"
