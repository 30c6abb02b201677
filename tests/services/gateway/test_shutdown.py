"""The end of a gateway: in one process with its fakes, and as a process of its own that gets a signal."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sys
from pathlib import Path

import grpc
import httpx
import pytest

from tests.services.gateway.conftest import CONTEXT, END, MODEL_NAME, MakeBench
from tests.services.gateway.fake_scheduler import FakeScheduler
from tests.services.gateway.fakes import FakeDecode, speaking
from tests.services.gateway.test_failures import events
from tests.services.gateway.test_grpc import code_of
from weft_mesh.v1 import inference_service_pb2 as pb
from weft_mesh.v1.inference_service_pb2_grpc import InferenceServiceStub

STREAM = {"model": MODEL_NAME, "prompt": "x", "stream": True}


async def read_all(bench: MakeBench, grace_seconds: float, finish: bool) -> tuple[str, FakeScheduler]:
    """A stream that is under way when the gateway stops: its text, and who knows how it ended."""
    async with httpx.AsyncClient(timeout=20) as http, asyncio.TaskGroup() as group:
        go_on = asyncio.Event()
        async with bench(grace_seconds=grace_seconds) as b:
            ids = b.ids("hello")
            plain = speaking([*ids, END]) if finish else speaking(ids, finish=None)

            async def script(start):  # type: ignore[no-untyped-def]
                deltas = plain(start)
                yield await anext(deltas)
                await go_on.wait()
                async for delta in deltas:
                    yield delta

            b.decode.script = script
            begun = asyncio.Event()

            async def ask() -> str:
                text = ""
                async with http.stream("POST", f"{b.url}/v1/completions", json=STREAM) as response:
                    async for piece in response.aiter_text():
                        text += piece
                        begun.set()
                return text

            asked = group.create_task(ask())
            await begun.wait()
            go_on.set()
    return asked.result(), b.scheduler


def told(scheduler: FakeScheduler) -> list[str]:
    """The stages told, each once: what is on its way to the scheduler when the gateway ends is told once more."""
    return list(dict.fromkeys(scheduler.stages()))


async def test_streams_under_way_may_end_within_the_grace(bench: MakeBench) -> None:
    text, scheduler = await read_all(bench, grace_seconds=10, finish=True)
    assert "".join(event["choices"][0]["text"] for event in events(text)) == "hello"
    assert told(scheduler) == ["first_token", "finished"]


async def test_streams_that_outlast_the_grace_end_with_an_error_frame(bench: MakeBench) -> None:
    text, scheduler = await read_all(bench, grace_seconds=0.1, finish=False)
    assert events(text)[-1]["error"]["code"] == "unavailable"
    assert told(scheduler) == ["first_token", "failed"]
    assert scheduler.settled[-1].failed_worker_id == ""  # nobody is blamed for our leaving
    assert len(scheduler.routed) == 1  # nor asked for another place


async def test_who_waits_for_a_place_beyond_the_grace_is_told_so(bench: MakeBench) -> None:
    async with httpx.AsyncClient(timeout=20) as http, asyncio.TaskGroup() as group, bench(grace_seconds=0.01) as b:
        b.scheduler.is_stuck = True
        channel = grpc.aio.insecure_channel(b.gateway.grpc_address)
        call = InferenceServiceStub(channel).Generate(pb.GenerateRequest(text="x"))
        called = group.create_task(code_of(call))
        asked = group.create_task(http.post(f"{b.url}/v1/completions", json=STREAM))
        await b.scheduler.until(lambda: len(b.scheduler.routed) == 2)
    await channel.close()
    answer = asked.result()
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable")
    assert answer.headers["retry-after"] == "1"
    assert called.result() is grpc.StatusCode.UNAVAILABLE
    assert "was lost; try again" in (await call.details())
    assert told(b.scheduler) == ["cancelled"]
    assert b.gateway.pipeline.num_in_flight == 0


async def start_process(model: Path, scheduler: str) -> asyncio.subprocess.Process:
    """`python -m weft_services.gateway` with ports of its own choice."""
    settings = {"WEFT_MODEL": str(model), "WEFT_SCHEDULER_ADDR": scheduler, "WEFT_GRACE_SECONDS": "1"}
    environment = {**os.environ, **settings, "WEFT_HTTP_PORT": "0", "WEFT_GRPC_PORT": "0"}
    command = (sys.executable, "-m", "weft_services.gateway")
    return await asyncio.create_subprocess_exec(*command, env=environment, stderr=asyncio.subprocess.PIPE)


async def line_with(process: asyncio.subprocess.Process, word: str) -> str:
    """The next log line that holds the word."""
    assert process.stderr is not None
    async with asyncio.timeout(30):
        while line := (await process.stderr.readline()).decode():
            if word in line:
                return line
    raise AssertionError(f"the process ended without saying {word}")


async def test_a_signal_ends_the_process_with_status_0(model_dir: Path) -> None:
    decode = FakeDecode()
    await decode.open()
    scheduler = FakeScheduler([decode], MODEL_NAME, CONTEXT)
    await scheduler.open()
    process = await start_process(model_dir, scheduler.address)
    line = await line_with(process, "listening")
    address = line.split("http=")[1].split()[0]
    await line_with(process, "ready=True")
    async with httpx.AsyncClient(base_url=f"http://{address}", timeout=20) as http:
        assert (await http.get("/ready")).status_code == 200
        answer = await http.post("/v1/completions", json={**STREAM, "stream": False})
        assert answer.status_code == 200
    process.send_signal(signal.SIGTERM)
    async with asyncio.timeout(20):
        assert await process.wait() == 0
    await scheduler.until(lambda: told(scheduler) == ["first_token", "finished"])
    await decode.kill()
    await scheduler.kill()


def damaged(model_dir: Path, copy: Path, file: str, content: str | None) -> Path:
    """A copy of the model with one file replaced, or left out."""
    shutil.copytree(model_dir, copy)
    if content is None:
        (copy / file).unlink()
    else:
        (copy / file).write_text(content)
    return copy


@pytest.mark.parametrize(
    ("file", "content", "word"),
    [
        ("config.json", None, "config.json: no such file"),
        ("config.json", "{", "config.json"),
        ("config.json", json.dumps({"vocab_size": 320}), "architectures"),
        ("tokenizer.json", "{}", "tokenizer.json"),
        ("chat_template.jinja", "{% if %}", "chat template"),
    ],
)
async def test_a_damaged_model_directory_is_named_at_start(
    model_dir: Path, tmp_path: Path, file: str, content: str | None, word: str
) -> None:
    process = await start_process(damaged(model_dir, tmp_path / "model", file, content), "127.0.0.1:1")
    assert word in await line_with(process, "cannot start")
    async with asyncio.timeout(20):
        assert await process.wait() == 2
