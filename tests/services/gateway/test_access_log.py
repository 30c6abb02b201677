"""The access log: one parseable line for every request of the public listeners."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import grpc
import pytest

from tests.collector import Collector
from tests.services.gateway.conftest import END, MODEL_NAME, MakeBench
from tests.services.gateway.fakes import SequenceDelta, Start, deltas, failing, forever, speaking
from tests.services.gateway.test_connections import connect, request_bytes
from tests.services.gateway.test_embeddings import with_prefill
from tests.services.gateway.test_grpc import stub_of
from tests.services.gateway.test_trace import collector
from weft import trace
from weft.api_keys import ApiKey, digest_of, dump_keys, make_secret
from weft_mesh.v1 import inference_service_pb2 as pb

__all__ = ["collector"]  # a fixture
LOGGER = "weft_services.gateway.front.request_record"
PAIR = re.compile(r'(\w+)=("(?:[^"\\]|\\.)*"|\S+)(?: |$)')
MESSAGES: Any = [{"role": "user", "content": "hello"}]
CHAT = {"model": MODEL_NAME, "messages": MESSAGES}


class Log:
    """The lines so far."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO, LOGGER)
        self._caplog = caplog
        self._num_read = 0

    async def next(self) -> tuple[int, dict[str, str]]:
        """Level and fields of the next one, which is all that has been written since."""
        async with asyncio.timeout(10):
            while len(self._records) == self._num_read:  # noqa: ASYNC110 (no event to await)
                await asyncio.sleep(0.001)
        *more, record = self._records[self._num_read :]
        assert not more
        self._num_read += 1
        line = record.getMessage()
        pairs = PAIR.findall(line)
        assert "".join(f"{name}={value} " for name, value in pairs) == f"{line} "
        return record.levelno, {name: json.loads(value) if value[0] == '"' else value for name, value in pairs}

    @property
    def _records(self) -> list[logging.LogRecord]:
        return [record for record in self._caplog.records if record.name == LOGGER]


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Log:
    return Log(caplog)


async def test_a_request_has_one_line_with_its_end_its_workers_and_its_stages(bench: MakeBench, log: Log) -> None:
    async with bench() as b:
        b.decode.script = speaking([*b.ids("hello world"), END], cached=3)
        for path, body in (
            ("/v1/chat/completions", CHAT),
            ("/v1/completions", {"model": MODEL_NAME, "prompt": "x", "stream": True}),
            ("/v1/messages", {**CHAT, "max_tokens": 50}),
        ):
            await b.http.post(path, json=body)
            level, told = await log.next()
            expected = {"method": "POST", "path": path, "status": "200", "outcome": "finished", "model": MODEL_NAME}
            assert {name: told[name] for name in expected} == expected
            assert (told["prefill"], told["decode"]) == ("prefill-0", "decode-0")
            assert told["cached"] == str(min(3, int(told["prompt"])))
            assert int(told["prepared_ms"]) <= int(told["routed_ms"]) <= int(told["first_token_ms"])
            assert int(told["first_token_ms"]) <= int(told["total_ms"])
            assert level == logging.INFO
            assert "trace" not in told
        async with with_prefill(b):
            await b.http.post("/v1/embeddings", json={"model": MODEL_NAME, "input": "x"})
        _, told = await log.next()
        assert (told["endpoint"], told["model"], told["prompt"]) == ("embeddings", MODEL_NAME, "1")


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "rest"),
    [
        ("GET", "/v1/models", None, 200, {}),
        ("GET", "/v1/models/other", None, 404, {}),
        ("GET", "/no%20%22such%22%0Athing=1", None, 404, {}),
        ("GET", "/v1/chat/completions", None, 405, {}),
        ("POST", "/tokenize", {"prompt": "x"}, 200, {"model": MODEL_NAME}),
        ("POST", "/detokenize", {"tokens": []}, 200, {"model": MODEL_NAME}),
        ("POST", "/v1/messages/count_tokens", CHAT, 200, {"model": MODEL_NAME}),
        ("POST", "/v1/responses/input_tokens", {"model": MODEL_NAME, "input": "x"}, 200, {"model": MODEL_NAME}),
        ("POST", "/tokenize", {}, 400, {"error": "InvalidRequest: prompt: expected either prompt or messages"}),
        ("POST", "/v1/chat/completions", {}, 400, {"outcome": "rejected"}),
        ("POST", "/v1/chat/completions", {**CHAT, "model": "other"}, 404, {"outcome": "rejected"}),
    ],
)
async def test_what_needs_no_worker_or_is_refused_has_its_line_too(
    bench: MakeBench, log: Log, method: str, path: str, body: Any, status: int, rest: dict[str, str]
) -> None:
    async with bench() as b:
        for silent in ("/health", "/ready", "/metrics", "/weft/page/main.js"):
            assert (await b.http.get(silent)).status_code == 200
        response = await b.http.request(method, path, json=body)
        assert response.status_code == status
        _, told = await log.next()
        assert (told["method"], told["path"], told["status"]) == (method, unquote(path), str(status))
        assert {name: told[name] for name in rest} == rest


async def test_who_is_not_let_in_is_named_by_nothing_but_the_error(bench: MakeBench, log: Log, tmp_path: Path) -> None:
    secret = make_secret()
    path = tmp_path / "keys.json"
    path.write_text(dump_keys([ApiKey("alice", digest_of(secret))]))
    async with bench(keys=str(path)) as b, stub_of(b) as stub:
        await b.http.get("/v1/models", headers={"authorization": "Bearer wrong"})
        _, told = await log.next()
        assert (told["status"], told["error"].split(":")[0], "key" in told) == ("401", "Unauthenticated", False)
        await b.http.get("/metrics")
        assert (await log.next())[1]["status"] == "401"
        await b.http.get("/v1/models", headers={"authorization": f"Bearer {secret}"})
        _, told = await log.next()
        assert (told["status"], told["key"]) == ("200", "alice")
        with pytest.raises(grpc.aio.AioRpcError):
            await stub.ListModels(pb.ListModelsRequest(), timeout=10)
        _, told = await log.next()
        assert (told["status"], "key" in told) == ("UNAUTHENTICATED", False)


async def test_calls_over_grpc_have_lines_like_requests(bench: MakeBench, log: Log) -> None:
    service = "/weft_mesh.v1.InferenceService"
    async with bench(migration_timeout_seconds=0.2) as b, stub_of(b) as stub:
        b.decode.script = speaking([*b.ids("hello"), END])
        assert [r async for r in stub.Generate(pb.GenerateRequest(text="x"), timeout=10)]
        _, told = await log.next()
        expected = {"method": "grpc", "path": f"{service}/Generate", "status": "OK", "outcome": "finished"}
        assert {name: told[name] for name in expected} == expected
        assert (told["model"], told["decode"]) == (MODEL_NAME, "decode-0")
        await stub.ListModels(pb.ListModelsRequest(), timeout=10)
        assert (await log.next())[1]["path"] == f"{service}/ListModels"
        await stub.Tokenize(pb.TokenizeRequest(text="x"), timeout=10)
        assert (await log.next())[1]["model"] == MODEL_NAME
        b.decode.script = failing(13)
        with pytest.raises(grpc.aio.AioRpcError, match="internal error"):
            assert [r async for r in stub.Generate(pb.GenerateRequest(text="x"), timeout=10)]
        level, told = await log.next()
        assert (level, told["status"], told["outcome"]) == (logging.WARNING, "INTERNAL", "failed")
        assert "at 10.1.2.3" in told["error"], "what clients are not told"
        with pytest.raises(grpc.aio.AioRpcError):
            assert [r async for r in stub.Chat(pb.ChatRequest(), timeout=10)]
        _, told = await log.next()
        assert (told["status"], told["outcome"]) == ("INVALID_ARGUMENT", "rejected")
        assert told["error"].startswith("InvalidRequest: messages")


async def test_failures_and_clients_that_leave_are_told_from_the_rest(bench: MakeBench, log: Log) -> None:
    async with bench(migration_timeout_seconds=0.1) as b:

        async def breaking(start: Start) -> AsyncIterator[SequenceDelta]:
            for delta in deltas(start, b.ids("hello"), None):
                yield delta
            async for failure in failing(13)(start):
                yield failure

        b.decode.script = breaking
        await b.http.post("/v1/chat/completions", json={**CHAT, "stream": True})
        level, told = await log.next()
        assert (level, told["status"], told["outcome"]) == (logging.WARNING, "200", "failed")
        assert "error" in told

        async def silent(start: Start) -> AsyncIterator[SequenceDelta]:
            await forever()
            yield SequenceDelta()

        b.decode.script = silent
        num_started = len(b.decode.started)
        _, writer = await connect(b)
        writer.write(request_bytes(stream=True))
        await b.decode.until(lambda: len(b.decode.started) > num_started)
        writer.close()
        _, told = await log.next()
        assert (told["status"], told["outcome"]) == ("499", "cancelled")


async def test_spans_of_all_endpoints_and_of_refusals_follow_the_conventions(
    bench: MakeBench, log: Log, collector: Collector
) -> None:
    async with bench() as b, with_prefill(b):
        await b.http.post("/v1/embeddings", json={"model": MODEL_NAME, "input": "x"})
        _, embedded = await log.next()
        await b.http.post("/v1/chat/completions", json={**CHAT, "temperature": 9})
        _, refused = await log.next()
    trace.shutdown()
    span = collector.span("gateway", f"embeddings {MODEL_NAME}")
    told = collector.attributes(span)
    assert (told["gen_ai.operation.name"], told["gen_ai.provider.name"]) == ("embeddings", "weft")
    assert (told["gen_ai.request.model"], told["gen_ai.usage.input_tokens"]) == (MODEL_NAME, 1)
    assert embedded["trace"] == span.trace_id.hex()
    span = collector.span("gateway", "chat")
    told = collector.attributes(span)
    assert (told["gen_ai.operation.name"], told["gen_ai.provider.name"]) == ("chat", "weft")
    assert (told["error.type"], told["weft.outcome"]) == ("InvalidRequest", "rejected")
    assert refused["trace"] == span.trace_id.hex()
