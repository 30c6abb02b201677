"""The histogram of our own says what the library's says."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from weft.metrics import LATENCY_BUCKETS, LoopHistogram


@given(st.lists(st.one_of(st.sampled_from(LATENCY_BUCKETS), st.floats(0, 100))))
def test_a_loop_histogram_is_exposed_as_the_librarys(values: list[float]) -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    histograms = (
        LoopHistogram("x", "y", LATENCY_BUCKETS, ours),
        Histogram("x", "y", buckets=LATENCY_BUCKETS, registry=theirs),
    )
    for value in values:
        for histogram in histograms:
            histogram.observe(value)
    lines = [line for line in generate_latest(theirs).decode().splitlines() if "_created" not in line]
    assert generate_latest(ours).decode().splitlines() == lines
