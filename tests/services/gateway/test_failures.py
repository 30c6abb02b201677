"""What clients see when something behind the gateway breaks, and what the scheduler is told."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import openai
import orjson
import pytest

from tests.services.gateway.conftest import END, MODEL_NAME, MakeBench
from tests.services.gateway.fakes import STOP, SequenceDelta, Stage, Start, deltas, failing, forever, speaking
from weft_services.gateway.mesh import generation_run

ROOT = Path(__file__).parents[3]
FAILED = Stage.STAGE_FAILED
STREAM = {"model": MODEL_NAME, "prompt": "x", "stream": True}


async def silent(start: Start) -> AsyncIterator[SequenceDelta]:
    """An engine that never says a word."""
    await forever()
    yield SequenceDelta()


def events(text: str) -> list[Any]:
    """The data of an SSE body; the last must be [DONE]."""
    data = [block.removeprefix("data: ") for block in text.split("\n\n") if block.startswith("data: ")]
    assert data.pop() == "[DONE]"
    return [orjson.loads(each) for each in data]


async def test_without_another_worker_a_stream_ends_with_an_error_frame_and_done(bench: MakeBench) -> None:
    async with bench(migration_timeout_seconds=0.3) as b:
        b.decode.script = speaking(b.ids("hello"), finish=None)
        received = ""
        async with b.http.stream("POST", "/v1/completions", json=STREAM) as response:
            assert response.status_code == 200
            async for piece in response.aiter_text():
                received += piece
                if "hello" in _text(received):
                    await b.decode.kill()
        error = events(received)[-1]["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["code"] == "unavailable"
        await b.scheduler.until(lambda: b.scheduler.stages() == ["first_token", "failed"])
        assert next(each.failed_worker_id for each in b.scheduler.settled if each.stage == FAILED) == "decode-0"


def _text(received: str) -> str:
    """The text of the whole frames so far."""
    frames = received.rpartition("\n\n")[0].removesuffix("data: [DONE]")
    whole = events(frames + "\n\ndata: [DONE]")
    return "".join(event["choices"][0]["text"] for event in whole if "choices" in event)


async def test_a_worker_lost_before_the_first_token_is_replaced_unseen(bench: MakeBench) -> None:
    async with bench(num_decoders=2) as b:
        first, second = b.decoders

        first.script = silent
        second.script = speaking([*b.ids("hello"), END])
        async with asyncio.TaskGroup() as group:
            asked = group.create_task(b.client.completions.create(model=MODEL_NAME, prompt="x"))
            await first.until(lambda: len(first.started) == 1)
            await first.kill()
        answer = asked.result()
        assert answer.choices[0].text == "hello"
        assert [(s.key.generation, s.decode_boot_id) for s in second.started] == [(1, "boot-1")]
        assert list(b.scheduler.routed[1].excluded_boot_ids) == ["boot-0"]
        await b.scheduler.until(lambda: b.scheduler.stages(1) == ["first_token", "finished"])
        assert b.scheduler.stages(0) == ["failed"]


async def test_a_worker_that_cannot_be_reached_is_replaced(bench: MakeBench) -> None:
    async with bench(num_decoders=2) as b:
        await b.decoders[0].kill()
        await b.client.completions.create(model=MODEL_NAME, prompt="x")
        assert len(b.decoders[1].started) == 1


async def test_workers_that_cannot_be_reached_are_tried_for_as_long_as_a_move_may_take(
    bench: MakeBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There are more of them than are passed over, so that the scheduler always has another to name."""
    monkeypatch.setattr(generation_run, "MAX_EXCLUDED", 2)
    async with bench(num_decoders=3, migration_timeout_seconds=3.0) as b:
        for decoder in b.decoders:
            await decoder.kill()
        async with asyncio.timeout(15):
            response = await b.http.post("/v1/completions", json={"model": MODEL_NAME, "prompt": "x"})
        assert response.status_code == 503
        newest = [sorted(query.excluded_boot_ids) for query in b.scheduler.routed[:5]]
        assert newest == [[], ["boot-0"], ["boot-0", "boot-1"], ["boot-1", "boot-2"], ["boot-0", "boot-2"]]


@pytest.mark.parametrize("code", [14, 9, 1], ids=["unavailable", "stale boot", "gave up"])
async def test_a_sequence_that_fails_without_a_token_is_moved_at_most_twice(bench: MakeBench, code: int) -> None:
    async with bench(num_decoders=4) as b:
        for decoder in b.decoders:
            decoder.script = failing(code)
        with pytest.raises(openai.APIStatusError) as refusal:
            await b.client.completions.create(model=MODEL_NAME, prompt="x")
        assert refusal.value.status_code == 503
        assert refusal.value.response.headers["retry-after"] == "1"
        assert "10.1.2.3" not in refusal.value.response.text
        assert [[start.key.generation for start in each.started] for each in b.decoders] == [[0], [1], [2], []]
        await b.scheduler.until(lambda: b.scheduler.stages(2) == ["failed"])


async def test_late_words_of_an_older_attempt_change_nothing(bench: MakeBench) -> None:
    async with bench(num_decoders=2) as b:
        b.decode.script = failing(14)

        async def script(start: Start) -> AsyncIterator[SequenceDelta]:
            for delta in deltas(b.decode.started[0], b.ids("late")):
                yield delta
            for delta in deltas(start, [*b.ids("hello"), END]):
                yield delta

        b.decoders[1].script = script
        answer = await b.client.completions.create(model=MODEL_NAME, prompt="x")
        assert answer.choices[0].text == "hello"


@pytest.mark.parametrize(
    ("refusal", "status", "kind"),
    [
        ((grpc.StatusCode.RESOURCE_EXHAUSTED, "full"), 429, "rate_limit_error"),
        ((grpc.StatusCode.UNAVAILABLE, "no decode worker"), 503, "server_error"),
        ((grpc.StatusCode.NOT_FOUND, "nobody serves it"), 503, "server_error"),
        ((grpc.StatusCode.CANCELLED, "going away"), 503, "server_error"),
    ],
    ids=["full", "no worker", "nobody joined", "going away"],
)
async def test_the_schedulers_refusals_keep_their_meaning(
    bench: MakeBench, refusal: Any, status: int, kind: str
) -> None:
    async with bench(migration_timeout_seconds=0.1) as b:
        b.scheduler.refusal = refusal
        response = await b.http.post("/v1/completions", json=STREAM)
        assert response.status_code == status
        assert response.json()["error"]["type"] == kind
        assert response.headers["retry-after"] == "1"
        if refusal[1] in ("no decode worker", "going away"):  # what the scheduler did with it is not known
            await b.scheduler.until(lambda: {*b.scheduler.stages()} == {"cancelled"})


async def test_a_full_fleet_is_told_nothing_of_those_whom_it_refused(bench: MakeBench) -> None:
    async with bench() as b:
        b.scheduler.refusal = (grpc.StatusCode.RESOURCE_EXHAUSTED, "full")
        assert (await b.http.post("/v1/completions", json=STREAM)).status_code == 429
        b.scheduler.refusal = None
        assert (await b.http.post("/v1/completions", json=STREAM)).status_code == 200
        # in the order in which they were said
        await b.scheduler.until(lambda: b.scheduler.stages()[-1:] == ["finished"])
        assert b.scheduler.stages() == ["first_token", "finished"]


@pytest.mark.parametrize(
    ("code", "status", "started", "words"),
    [
        (13, 500, [1, 1, 0], "internal error"),
        (8, 429, [1, 1], "no worker has capacity"),
        (4, 504, [1], "too long"),
    ],
    ids=["broken engine", "full", "late"],
)
async def test_failure_of_every_worker_has_its_status_and_number_of_attempts(
    bench: MakeBench, code: int, status: int, started: list[int], words: str
) -> None:
    async with bench(num_decoders=len(started)) as b:
        for decoder in b.decoders:
            decoder.script = failing(code, decoder.worker_id if status == 429 else "")
        response = await b.http.post("/v1/completions", json=STREAM)
        assert response.status_code == status
        assert words in response.json()["error"]["message"]
        assert "10.1.2.3" not in response.text
        assert [len(each.started) for each in b.decoders] == started
        await b.scheduler.until(lambda: b.scheduler.stages(sum(started) - 1) == ["failed"])
        assert status != 429 or not any(each.failed_worker_id for each in b.scheduler.settled), "being full is no fault"


@pytest.mark.parametrize("finish", [None, STOP], ids=["goes on", "ends too late"])
async def test_a_worker_that_says_more_than_it_was_asked_for_is_cut_off(bench: MakeBench, finish: Any) -> None:
    async with bench() as b:
        ids = b.ids("the answer is here and there")
        b.decode.script = speaking(ids, finish)
        body = {"model": MODEL_NAME, "prompt": "x", "max_tokens": 3, "return_token_ids": True, "logprobs": 1}
        answer = (await b.http.post("/v1/completions", json=body)).json()
        (choice,) = answer["choices"]
        assert choice["token_ids"] == ids[:3]
        assert len(choice["logprobs"]["tokens"]) == 3
        assert (choice["finish_reason"], answer["usage"]["completion_tokens"]) == ("length", 3)
        if finish is None:
            await b.decode.until(lambda: len(b.decode.cancelled) == 1)


async def test_a_worker_lost_right_behind_the_last_token_is_not_replaced(bench: MakeBench) -> None:
    async with bench(num_decoders=2) as b:
        ids = b.ids("the answer is here")[:3]

        async def script(start: Start) -> AsyncIterator[SequenceDelta]:
            for delta in deltas(start, ids, None):
                yield delta
            async for failure in failing(14)(start):
                yield failure

        b.decode.script = script
        answer = await b.client.completions.create(model=MODEL_NAME, prompt="x", max_tokens=3)
        assert answer.choices[0].finish_reason == "length"
        assert len(b.scheduler.routed) == 1


async def test_another_decode_worker_is_asked_before_a_429(bench: MakeBench) -> None:
    async with bench(num_decoders=2) as b:
        b.decode.script = failing(8)
        b.decoders[1].script = speaking([*b.ids("hello"), END])
        assert (await b.client.completions.create(model=MODEL_NAME, prompt="x")).choices[0].text == "hello"


async def test_a_request_that_takes_too_long_is_a_504_and_is_cancelled(bench: MakeBench) -> None:
    async with bench(request_timeout_seconds=2) as b:
        b.decode.script = speaking(b.ids("hello"), finish=None)
        response = await b.http.post("/v1/completions", json={**STREAM, "stream": False})
        assert response.status_code == 504
        await b.decode.until(lambda: len(b.decode.cancelled) == 1)
        await b.scheduler.until(lambda: b.scheduler.stages()[-1:] == ["cancelled"])


async def test_a_lost_stream_to_a_worker_is_opened_anew(bench: MakeBench) -> None:
    async with bench() as b:
        await b.client.completions.create(model=MODEL_NAME, prompt="x")
        await b.client.completions.create(model=MODEL_NAME, prompt="x")
        assert b.decode.num_attached == 1
        await b.decode.kill()
        back = type(b.decode)("decode-0", "boot-new")
        await back.open()
        b.scheduler.decoders[0] = back
        await b.client.completions.create(model=MODEL_NAME, prompt="x")
        assert back.num_attached == 1
        await back.kill()


async def test_when_one_choice_fails_the_others_are_cancelled(bench: MakeBench) -> None:
    async with bench() as b:

        async def script(start: Start) -> AsyncIterator[SequenceDelta]:
            if list(start.token_ids) == [5]:
                async for delta in failing(3)(start):
                    yield delta
            await forever()

        b.decode.script = script
        response = await b.http.post("/v1/completions", json={"model": MODEL_NAME, "prompt": [[5], [6]]})
        assert response.status_code == 400
        await b.decode.until(lambda: len(b.decode.cancelled) == 1)
        await b.scheduler.until(lambda: sorted(b.scheduler.stages()) == ["cancelled", "failed"])


@pytest.mark.quick_to_notice
async def test_a_frozen_worker_is_noticed_long_before_the_requests_deadline(bench: MakeBench) -> None:
    command = (sys.executable, "-m", "tests.services.gateway.lone_decode")
    frozen = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdout=asyncio.subprocess.PIPE)
    assert frozen.stdout is not None
    try:
        async with bench(migration_timeout_seconds=0.1) as b, asyncio.timeout(20):
            b.decode.address = (await frozen.stdout.readline()).decode().strip()
            received = ""
            async with b.http.stream("POST", "/v1/completions", json=STREAM) as response:
                async for piece in response.aiter_text():
                    received += piece
                    frozen.send_signal(signal.SIGSTOP)
            assert events(received)[-1]["error"]["code"] == "unavailable"
    finally:
        frozen.kill()
        await frozen.wait()
