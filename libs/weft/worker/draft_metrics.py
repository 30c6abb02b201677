"""Metrics of speculation, read from the speculator's counters when Prometheus asks: a step costs nothing more."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from weft.engine.drafting.draft_stats import DraftStats, OffReason, SourceStats
from weft.engine.drafting.drafter import DraftSource
from weft.metrics import REGISTRY

# Upper bounds of tokens that one sequence gains in one step; a step has at most 16 rows of a sequence.
TOKEN_BUCKETS = (1, 2, 3, 4, 6, 8, 12, 16)
SOURCES = [source for source in DraftSource if source is not DraftSource.HEAD]
NO_STATS = SourceStats()
NOTHING = DraftStats({}, (), {}, 0.0)


class DraftCollector(Collector):
    """Yields the metrics of this process's speculator; all are 0 without one.

    `read` returns its counters and is called on any thread. With several engines in one process the last one counts.
    """

    def __init__(self) -> None:
        self.read: Callable[[], DraftStats] = lambda: NOTHING

    def collect(self) -> Iterator[Metric]:
        stats = self.read()
        proposals = CounterMetricFamily("weft_spec_drafts", "Proposals that steps verified", labels=["source"])
        verified = CounterMetricFamily("weft_spec_draft_tokens", "Draft tokens that steps verified", labels=["source"])
        accepted = CounterMetricFamily("weft_spec_accepted_tokens", "Draft tokens accepted", labels=["source"])
        by_place = CounterMetricFamily(
            "weft_spec_accepted_tokens_per_position",
            "Draft tokens accepted, by their place in the step, from 0",
            labels=["source", "position"],
        )
        for source in SOURCES:
            each = stats.sources.get(source, NO_STATS)
            proposals.add_metric([source], each.num_proposals)
            verified.add_metric([source], sum(each.verified))
            accepted.add_metric([source], sum(each.accepted))
            for place, count in enumerate(each.accepted):
                by_place.add_metric([source, str(place)], count)
        yield from (proposals, verified, accepted, by_place, _tokens_per_step(stats.tokens_per_step))
        off = CounterMetricFamily(
            "weft_spec_off_seconds", "Duration of steps that verified none of their drafts", labels=["reason"]
        )
        for reason in OffReason:
            off.add_metric([reason], stats.off_seconds.get(reason, 0.0))
        yield off
        yield GaugeMetricFamily(
            "weft_spec_loss_seconds", "Time lost lately by verifying drafts; 0 while they gain", stats.loss_seconds
        )


def _tokens_per_step(counts: Sequence[int]) -> Metric:
    """Return the histogram; element n of `counts` is the number of steps of one sequence that gained n tokens."""
    totals = list(accumulate(counts))
    upto = [0 if not totals else totals[min(bound, len(totals) - 1)] for bound in TOKEN_BUCKETS]
    buckets = [(str(float(bound)), float(total)) for bound, total in zip(TOKEN_BUCKETS, upto, strict=True)]
    family = HistogramMetricFamily("weft_spec_tokens_per_step", "Tokens that a sequence gained in a decode step")
    family.add_metric([], [*buckets, ("+Inf", float(sum(counts)))], sum(n * count for n, count in enumerate(counts)))
    return family


COLLECTOR = DraftCollector()
REGISTRY.register(COLLECTOR)


@contextmanager
def exposed(read: Callable[[], DraftStats] | None) -> Iterator[None]:
    """Expose a speculator's counters inside the block; None: the worker has no speculator."""
    if read is not None:
        COLLECTOR.read = read
    try:
        yield
    finally:
        COLLECTOR.read = lambda: NOTHING
