"""A worker is lost in mid-answer: the answer goes on elsewhere, and the client cannot tell where the seam is."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import httpx
import orjson
import pytest

from tests.services.gateway.conftest import END, MODEL_NAME, Bench, Heard, MakeBench
from tests.services.gateway.fakes import LENGTH, FakeDecode, SequenceDelta, Silence, Start, answering, deltas, failing
from weft_services.gateway.mesh import generation_run

TEXT = "the answer is here and there, hello world"


pytestmark = pytest.mark.usefixtures("heard")


async def kill_after(decode: FakeDecode, num_starts: int = 1) -> None:
    """Once so many sequences run there, have fallen silent, and what they said has arrived."""
    await decode.until(lambda: len(decode.started) >= num_starts)
    async with asyncio.timeout(10):
        while Silence.num_silent < num_starts or Heard.count < decode.num_said:  # noqa: ASYNC110 (no event to await)
            await asyncio.sleep(0.005)
    await decode.kill()


async def ask(b: Bench, num_starts: int = 1, **fields: Any) -> httpx.Response:
    """A completion whose worker dies on the way."""
    async with asyncio.TaskGroup() as group:
        body = {"model": MODEL_NAME, "prompt": "user", **fields}
        asked = group.create_task(b.http.post("/v1/completions", json=body))
        group.create_task(kill_after(b.decode, num_starts))
    return asked.result()


def events(response: httpx.Response) -> list[Any]:
    """The data of an SSE body that ended well."""
    data = [block.removeprefix("data: ") for block in response.text.split("\n\n") if block.startswith("data: ")]
    assert data.pop() == "[DONE]"
    return [orjson.loads(each) for each in data]


@pytest.mark.parametrize("num_said", [1, 2, 5])
async def test_a_stream_goes_on_with_the_next_token(bench: MakeBench, num_said: int) -> None:
    async with bench(num_decoders=2) as b:
        answer = [*b.ids(TEXT), END]
        b.decode.script, b.decoders[1].script = answering(answer, dies_after=num_said), answering(answer)
        response = await ask(b, stream=True, seed=7, temperature=1.0, max_tokens=100)
        assert "".join(event["choices"][0]["text"] for event in events(response)) == TEXT
        first, second = b.decode.started[0], b.decoders[1].started[0]
        assert list(second.token_ids) == [*first.token_ids, *answer[:num_said]]
        assert second.resumed_tokens == num_said
        assert second.sampling == first.sampling, "the same seed, and max_tokens still counts from the prompt's end"
        assert b.scheduler.routed[1].prompt_tokens == len(second.token_ids)
        assert b.scheduler.routed[1].max_tokens == 100 - num_said
        assert [routed.resumed_tokens for routed in b.scheduler.routed] == [0, num_said]
        assert list(b.scheduler.routed[1].excluded_boot_ids) == ["boot-0"]
        await b.scheduler.until(lambda: b.scheduler.stages(1) == ["first_token", "finished"])
        assert b.scheduler.stages(0) == ["first_token", "failed"]
        assert b.scheduler.settled[-1].generated_tokens == len(answer) - num_said


async def test_usage_is_that_of_the_clients_prompt_and_of_one_answer(bench: MakeBench) -> None:
    async with bench(num_decoders=2) as b:
        answer = [*b.ids(TEXT), END]
        b.decode.script, b.decoders[1].script = answering(answer, dies_after=4), answering(answer)
        response = await ask(b, prompt=list(range(10, 30)))
        usage = response.json()["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (20, len(answer))
        assert usage["total_tokens"] == 20 + len(answer)
        assert usage["prompt_tokens_details"]["cached_tokens"] == 10
        assert response.json()["choices"][0]["finish_reason"] == "stop"


async def test_no_token_is_reported_twice_or_left_out(bench: MakeBench) -> None:
    async with bench(num_decoders=2) as b:
        answer = b.ids(TEXT)
        b.decode.script = answering(answer, dies_after=3)
        b.decoders[1].script = answering(answer, finish=LENGTH)
        response = await ask(b, logprobs=2, return_token_ids=True, stream=True)
        choices = [event["choices"][0] for event in events(response)]
        assert [token for choice in choices for token in choice["token_ids"]] == answer
        pieces = [choice["logprobs"] for choice in choices]
        assert [text for each in pieces for text in each["tokens"]] == [b.tokenizer.decode([t]) for t in answer]
        offsets = [offset for each in pieces for offset in each["text_offset"]]
        assert offsets == sorted(set(offsets))
        assert choices[-1]["finish_reason"] == "length"


async def test_a_stop_string_across_the_seam_is_found(bench: MakeBench) -> None:
    async with bench(num_decoders=2) as b:
        answer = [*b.ids(TEXT), END]
        cut = next(i for i in range(len(answer)) if "here" in b.tokenizer.decode(answer[:i])) - 1
        seam = b.tokenizer.decode(answer[: cut + 2])[len(b.tokenizer.decode(answer[: cut - 1])) :]
        b.decode.script = answering(answer, dies_after=cut)
        b.decoders[1].script = answering(answer, dies_after=len(answer))  # and has not ended by itself when it is found
        response = await ask(b, stop=[seam])
        assert response.json()["choices"][0]["text"] == TEXT[: TEXT.index(seam)]
        assert response.json()["choices"][0]["finish_reason"] == "stop"
        await b.decoders[1].until(lambda: len(b.decoders[1].cancelled) == 1)


async def test_a_character_across_the_seam_is_whole(bench: MakeBench) -> None:
    async with bench(num_decoders=2) as b:
        answer = [*b.ids("a \N{GRINNING FACE} b"), END]
        b.decode.script, b.decoders[1].script = answering(answer, dies_after=4), answering(answer)
        assert (await ask(b)).json()["choices"][0]["text"] == "a \N{GRINNING FACE} b"


async def test_all_choices_move_each_from_where_it_was(bench: MakeBench) -> None:
    async with bench(num_decoders=2) as b:
        answers = {5: [*b.ids("hello world"), END], 6: [*b.ids("the answer"), END]}

        async def dying(start: Start) -> AsyncIterator[SequenceDelta]:
            first = start.token_ids[0]
            async for delta in answering(answers[first], dies_after=first - 4)(start):
                yield delta

        async def living(start: Start) -> AsyncIterator[SequenceDelta]:
            async for delta in answering(answers[start.token_ids[0]])(start):
                yield delta

        b.decode.script, b.decoders[1].script = dying, living
        response = await ask(b, num_starts=2, prompt=[[5], [6]])
        assert [choice["text"] for choice in response.json()["choices"]] == ["hello world", "the answer"]
        assert sorted(start.resumed_tokens for start in b.decoders[1].started) == [1, 2]


async def test_a_stream_waits_for_its_only_worker_to_be_restarted(bench: MakeBench) -> None:
    async with bench() as b:
        answer = [*b.ids(TEXT), END]
        b.decode.script = answering(answer, dies_after=3)

        async def restart() -> None:
            await kill_after(b.decode)
            back = FakeDecode("decode-0", "boot-new")
            back.script = answering(answer)
            await back.open()
            await b.scheduler.until(lambda: len(b.scheduler.routed) > 1)
            b.decoders[0] = back

        async with asyncio.TaskGroup() as group:
            body = {"model": MODEL_NAME, "prompt": "user", "stream": True}
            asked = group.create_task(b.http.post("/v1/completions", json=body))
            group.create_task(restart())
        assert "".join(event["choices"][0]["text"] for event in events(asked.result())) == TEXT
        await b.decode.kill()


async def test_a_lonely_worker_that_failed_is_asked_again_when_it_is_no_longer_suspect(
    bench: MakeBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generation_run, "SUSPECT_SECONDS", 0.2)
    async with bench() as b:
        answer = [*b.ids(TEXT), END]

        async def script(start: Start) -> AsyncIterator[SequenceDelta]:
            if not start.resumed_tokens:
                yield deltas(start, answer[:1], None)[0]
                yield await anext(failing(14)(start))
            async for delta in answering(answer)(start):
                yield delta

        b.decode.script = script
        response = await b.http.post("/v1/completions", json={"model": MODEL_NAME, "prompt": "user"})
        assert response.json()["choices"][0]["text"] == TEXT
        excluded = [list(query.excluded_boot_ids) for query in b.scheduler.routed]
        assert excluded[:2] == [[], ["boot-0"]]
        assert excluded[-1] == []


async def test_streams_are_moved_once_the_scheduler_is_back(bench: MakeBench) -> None:
    async with bench(num_decoders=2) as b:
        answer = [*b.ids(TEXT), END]
        b.decode.script, b.decoders[1].script = answering(answer, dies_after=3), answering(answer)

        async def break_and_mend() -> None:
            await b.decode.until(lambda: len(b.decode.started) == 1)
            b.scheduler.refusal = (grpc.StatusCode.UNAVAILABLE, "going away")
            await kill_after(b.decode)
            await b.scheduler.until(lambda: len(b.scheduler.routed) >= 3)
            b.scheduler.refusal = None

        async with asyncio.TaskGroup() as group:
            asked = group.create_task(b.http.post("/v1/completions", json={"model": MODEL_NAME, "prompt": "user"}))
            group.create_task(break_and_mend())
        assert asked.result().json()["choices"][0]["text"] == TEXT


async def test_a_stream_that_makes_headway_is_moved_as_often_as_it_takes(bench: MakeBench) -> None:
    async with bench(num_decoders=6) as b:
        answer = [*b.ids(TEXT), END]

        async def one_token(start: Start) -> AsyncIterator[SequenceDelta]:
            yield deltas(start, [answer[start.resumed_tokens]], None)[0]
            async for failure in failing(14)(start):
                yield failure

        for decoder in b.decoders[:5]:
            decoder.script = one_token
        b.decoders[5].script = answering(answer)
        response = await b.http.post("/v1/completions", json={"model": MODEL_NAME, "prompt": "user"})
        assert response.json()["choices"][0]["text"] == TEXT
        assert b.decoders[5].started[0].resumed_tokens == 5


@pytest.mark.parametrize(("temperature", "versions"), [(0.0, (1, 2)), (1.0, (2, 2)), (1.0, (None, 2))])
async def test_stream_continues_where_its_tokens_are_the_same(
    bench: MakeBench, temperature: float, versions: tuple[int | None, int]
) -> None:
    """Greedy tokens depend on no version; an old scheduler names none."""
    async with bench(num_decoders=2) as b:
        b.scheduler.sampling_versions = {f"decode-{i}": each for i, each in enumerate(versions) if each is not None}
        answer = [*b.ids(TEXT), END]
        b.decode.script, b.decoders[1].script = answering(answer, dies_after=3), answering(answer)
        response = await ask(b, temperature=temperature)
        assert response.json()["choices"][0]["text"] == TEXT
        first, moved = b.scheduler.routed
        assert not first.HasField("sampling_version")
        assert moved.HasField("sampling_version") == (temperature > 0 and versions[0] is not None)


async def test_sampled_stream_fails_when_only_another_version_is_left(bench: MakeBench) -> None:
    async with bench(num_decoders=2, migration_timeout_seconds=0.2) as b:
        b.scheduler.sampling_versions = {"decode-0": 1, "decode-1": 2}
        answer = [*b.ids(TEXT), END]
        b.decode.script, b.decoders[1].script = answering(answer, dies_after=3), answering(answer)
        response = await ask(b, temperature=1.0)
        assert response.status_code == 503
        error = response.json()["error"]
        assert error["code"] == "sampling_changed"
        assert "would sample different tokens; send the request again" in error["message"]
        assert not b.decoders[1].started
        assert {routed.sampling_version for routed in b.scheduler.routed[1:]} == {1}


async def test_sampled_stream_may_change_version_before_its_first_token(bench: MakeBench) -> None:
    async with bench(num_decoders=2) as b:
        b.scheduler.sampling_versions = {"decode-0": 1, "decode-1": 2}
        b.decode.script, b.decoders[1].script = failing(14), answering([*b.ids(TEXT), END])
        body = {"model": MODEL_NAME, "prompt": "user", "temperature": 1.0}
        response = await b.http.post("/v1/completions", json=body)
        assert response.json()["choices"][0]["text"] == TEXT


async def test_a_client_that_leaves_during_a_move_leaves_nothing_behind(bench: MakeBench) -> None:
    async with bench() as b:
        b.decode.script = answering(b.ids(TEXT), dies_after=2)
        body = {"model": MODEL_NAME, "prompt": "user", "stream": True}
        async with b.http.stream("POST", "/v1/completions", json=body) as response:
            async for _ in response.aiter_text():
                await b.decode.kill()
                await b.scheduler.until(lambda: len(b.scheduler.routed) > 2)
                break
        routed = len(b.scheduler.routed)
        await b.scheduler.until(lambda: b.scheduler.stages(routed - 1) == ["cancelled"])
        async with asyncio.timeout(10):
            while b.gateway.pipeline.num_in_flight:  # noqa: ASYNC110 (no event to await)
                await asyncio.sleep(0.01)


async def test_a_prefill_worker_that_is_lost_after_its_first_token_is_named_to_the_scheduler(bench: MakeBench) -> None:
    async with bench() as b:

        async def script(start: Start) -> AsyncIterator[SequenceDelta]:
            for number, delta in enumerate(deltas(start, b.ids("hello world"), LENGTH)):
                delta.ClearField("prompt")
                if number == 1:  # by then the rest of the prompt has been computed again
                    delta.prompt.prefill_worker_id, delta.prompt.failed_worker_id = "decode-0", "prefill-0"
                yield delta

        b.decode.script = script
        await b.http.post("/v1/completions", json={"model": MODEL_NAME, "prompt": "user", "stream": True})
        await b.scheduler.until(lambda: b.scheduler.stages()[-1:] == ["finished"])
        assert b.scheduler.settled[-2].failed_worker_id == "prefill-0"
