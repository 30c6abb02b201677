"""One request through a whole mesh is one trace, with spans of every service that had a part in it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.collector import Collector
from tests.mesh.conftest import Mesh, wait_until

TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
SERVICES = {"gateway", "scheduler", "prefill", "decode", "kvstore"}


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    """For all processes of a mesh."""
    with Collector() as made:
        yield made


@pytest.fixture(scope="module")
def traced(collector: Collector) -> Iterator[Mesh]:
    """A mesh that says what it does; what the store might have is always asked for."""
    environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.endpoint, "OTEL_BSP_SCHEDULE_DELAY": "100"}
    environment |= {"WEFT_STORE_FETCH_POLICY": "always", "no_proxy": "127.0.0.1"}
    running = Mesh("--transport", "mooncake", environment=environment)
    try:
        running.wait_ready()
        yield running
    finally:
        running.stop()


def test_a_request_is_one_trace_over_five_services(traced: Mesh, collector: Collector) -> None:
    body = {"model": "weft-nano", "messages": [{"role": "user", "content": "Who are you? " * 40}], "max_tokens": 8}
    headers = {"traceparent": f"00-{TRACE_ID}-00f067aa0ba902b7-01"}
    answer = traced.client.post("/v1/chat/completions", json=body, headers=headers)
    assert answer.status_code == 200
    trace_id = bytes.fromhex(TRACE_ID)
    wait_until("all services have told", lambda: collector.services(trace_id) >= SERVICES)
    # and of each the span that ends last: what is under it may have come in a batch before
    last = (("gateway", "chat weft-nano"), ("scheduler", "route"), ("decode", "decode"), ("prefill", "prefill"))
    wait_until("all spans are there", lambda: all(collector.spans(*each) for each in (*last, ("kvstore", "match"))))
    root = collector.span("gateway", "chat weft-nano")
    assert collector.attributes(root)["gen_ai.usage.input_tokens"] == answer.json()["usage"]["prompt_tokens"]
    route, decode = collector.span("scheduler", "route"), collector.span("decode", "decode")
    prefill = collector.span("prefill", "prefill")
    assert route.parent_span_id == decode.parent_span_id == root.span_id
    assert prefill.parent_span_id == decode.span_id
    (fetch,) = collector.spans("prefill", "store fetch")
    assert collector.spans("kvstore", "match")[0].parent_span_id == fetch.span_id
    stages = [span.name for span in collector.spans("decode") if span.parent_span_id == decode.span_id]
    assert stages == ["routed", "reserved", "prefilling", "transferring", "decoding"]
    compute = collector.span("prefill", "compute")
    assert prefill.start_time_unix_nano <= compute.start_time_unix_nano <= compute.end_time_unix_nano
    assert compute.end_time_unix_nano <= prefill.end_time_unix_nano
