"""The histogram of our own says what the library's says; where they are shown."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from weft.errors import BindError
from weft.metrics import LATENCY_BUCKETS, SingleThreadHistogram, expose

TIMES = st.one_of(st.sampled_from(LATENCY_BUCKETS), st.floats(0, 100))


@given(st.lists(st.tuples(st.sampled_from(["a", "b"]), TIMES)))
def test_a_loop_histogram_is_exposed_as_the_librarys(values: list[tuple[str, float]]) -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    own = SingleThreadHistogram("x", "y", "model", LATENCY_BUCKETS, ours)
    librarys = Histogram("x", "y", ["model"], buckets=LATENCY_BUCKETS, registry=theirs)
    for model, value in values:
        own.of(model).observe(value)
        librarys.labels(model).observe(value)
    lines = [line for line in generate_latest(theirs).decode().splitlines() if "_created" not in line]
    assert generate_latest(ours).decode().splitlines() == lines


@pytest.mark.parametrize("host", ["a..b", "192.0.2.1"])
def test_a_host_that_is_none_or_another_machines_is_named_with_its_variable(host: str) -> None:
    with pytest.raises(BindError, match=rf"cannot listen on {host}:0 for metrics \(WEFT_METRICS_PORT\): \w+"):
        expose(host, 0)
