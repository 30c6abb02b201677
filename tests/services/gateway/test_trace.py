"""A request's trace at the gateway: conventions, context in and along, and nothing at all while nobody asks for it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from tests.collector import Collector
from tests.services.gateway.conftest import END, MODEL_NAME, MakeBench
from tests.services.gateway.fakes import failing, speaking
from weft import trace
from weft.errors import ConfigError
from weft_mesh.v1 import inference_service_pb2 as pb
from weft_mesh.v1.inference_service_pb2_grpc import InferenceServiceStub

MESSAGES: Any = [{"role": "user", "content": "hello"}]
TRACE_ID, SPAN_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
PARENT = {"traceparent": f"00-{TRACE_ID}-{SPAN_ID}-01"}


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    """Spans of this process, as OTLP brings them to a collector."""
    with Collector() as made:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", made.endpoint)
        trace.setup("gateway", "test")
        yield made
        trace.shutdown()


async def test_the_span_follows_the_conventions_and_the_clients_trace(bench: MakeBench, collector: Collector) -> None:
    async with bench() as b:
        b.decode.script = speaking([100, 101, 102], cached=7)
        body = {"model": MODEL_NAME, "messages": MESSAGES, "max_tokens": 9, "temperature": 0.5, "seed": 3}
        assert (await b.http.post("/v1/chat/completions", json=body, headers=PARENT)).status_code == 200
        started = b.decode.started[0].traceparent
    trace.shutdown()
    span = collector.span("gateway", f"chat {MODEL_NAME}")
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE_ID, SPAN_ID)
    assert span.kind == span.SPAN_KIND_SERVER
    assert started == f"00-{TRACE_ID}-{span.span_id.hex()}-01"
    told = collector.attributes(span)
    expected = {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "weft",
        "gen_ai.request.model": MODEL_NAME,
        "gen_ai.request.max_tokens": 9,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.seed": 3,
        "gen_ai.request.stream": False,
        "gen_ai.response.model": MODEL_NAME,
        "gen_ai.response.finish_reasons": ["stop"],
        "gen_ai.usage.output_tokens": 3,
        "gen_ai.usage.cache_read.input_tokens": 7,
        "weft.outcome": "finished",
    }
    assert {key: told.get(key) for key in expected} == expected
    assert 0 < told["gen_ai.response.time_to_first_chunk"] < 20
    assert "hello" not in json.dumps(told)
    received = collector.span("gateway", "received")
    assert received.parent_span_id == span.span_id
    assert span.start_time_unix_nano <= received.end_time_unix_nano <= span.end_time_unix_nano


async def test_a_failure_is_one_in_its_span_and_a_strange_context_begins_anew(
    bench: MakeBench, collector: Collector
) -> None:
    async with bench(migration_timeout_seconds=0.2) as b:
        b.decode.script = failing(grpc.StatusCode.INVALID_ARGUMENT.value[0])
        body = {"model": MODEL_NAME, "prompt": "hello"}
        for parent in ("nonsense", "00-" + "0" * 32 + "-" + "0" * 16 + "-01"):
            await b.http.post("/v1/completions", json=body, headers={"traceparent": parent})
        b.decode.script = failing(grpc.StatusCode.DATA_LOSS.value[0])
        assert (await b.http.post("/v1/completions", json=body)).status_code == 500
    trace.shutdown()
    spans = collector.spans("gateway", f"text_completion {MODEL_NAME}")
    assert len({span.trace_id for span in spans}) == 3
    assert all(not span.parent_span_id for span in spans)
    assert spans[-1].status.code == spans[-1].status.STATUS_CODE_ERROR
    assert "error.type" in collector.attributes(spans[-1])


CALL = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
TOOL: Any = {"type": "function", "function": {"name": "now"}}


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/chat/completions", {"messages": MESSAGES, "tools": [TOOL]}),
        ("/v1/chat/completions", {"messages": MESSAGES, "tools": [TOOL], "stream": True}),
        ("/v1/responses", {"input": "hello", "tools": [{"type": "function", "name": "now"}]}),
        ("/v1/messages", {"messages": MESSAGES, "max_tokens": 99, "tools": [{"name": "now", "input_schema": {}}]}),
    ],
)
async def test_the_span_says_that_tools_were_called(
    bench: MakeBench, collector: Collector, path: str, fields: dict[str, Any]
) -> None:
    async with bench(tool_format="hermes") as b:
        b.decode.script = speaking([*b.ids(CALL), END])
        assert (await b.http.post(path, json={"model": MODEL_NAME, **fields})).status_code == 200
        chat = pb.ChatRequest(
            messages=[pb.ChatMessage(role="user", content="hello")],
            tools_json=[json.dumps(TOOL)],
            options=pb.GenerationOptions(max_tokens=99),
        )
        async with grpc.aio.insecure_channel(b.gateway.grpc_address) as channel:
            async for _ in InferenceServiceStub(channel).Chat(chat, timeout=10):
                pass
    trace.shutdown()
    spans = collector.spans("gateway", f"chat {MODEL_NAME}")
    assert [collector.attributes(span)["gen_ai.response.finish_reasons"] for span in spans] == [["tool_calls"]] * 2


async def test_without_a_collector_nothing_is_sent_along(bench: MakeBench) -> None:
    async with bench() as b:
        body = {"model": MODEL_NAME, "messages": MESSAGES}
        assert (await b.http.post("/v1/chat/completions", json=body, headers=PARENT)).status_code == 200
        assert b.decode.started[0].traceparent == ""


def test_without_a_collector_nothing_is_imported() -> None:
    program = """
import os, sys
os.environ.pop("OTEL_EXPORTER_OTLP_ENDPOINT", None)
import weft_services.gateway.__main__, weft_services.scheduler.__main__
from weft import trace
trace.setup("gateway")
with trace.server_span("route", "00-%s-%s-01") as span, trace.child_span("part") as part:
    assert span is part is None and trace.outgoing() is None and trace.start_span("x") is None
# redis imports the SDK wherever it finds one
sys.exit(any(name.startswith(("opentelemetry.exporter", "opentelemetry.sdk.trace")) for name in sys.modules))
"""
    program %= (TRACE_ID, SPAN_ID)
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_a_collector_without_the_libraries_is_a_wrong_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.grpc.trace_exporter", None)
    with pytest.raises(ConfigError, match="OTEL_EXPORTER_OTLP_ENDPOINT is set"):
        trace.setup("gateway")
