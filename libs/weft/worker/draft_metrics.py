"""Metrics of speculation, read from the speculator's counters when Prometheus asks: a step costs nothing more."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from weft.engine.drafting.draft_stats import DraftStats, OffReason, SourceStats
from weft.engine.drafting.drafter import DraftSource
from weft.metrics import REGISTRY

logger = logging.getLogger(__name__)
# Upper bounds of tokens that one sequence gains in one step; a step has at most 16 rows of a sequence.
TOKEN_BUCKETS = (1, 2, 3, 4, 6, 8, 12, 16)
NO_STATS = SourceStats()
NOTHING = DraftStats({}, (), {}, 0.0)
# Proposals of a draft head that are judged together.
JUDGED_PROPOSALS = 2000
# Tokens per step with drafts of a head, the sampled one included. A published head of Llama 3.3 70B gives 2.77, but
# 1.04 with wrong layer ids.
MIN_HEAD_TOKENS = 1.15
JUDGE_SECONDS = 10.0


class HeadAlarm:
    """Detects a draft head that drafts nearly nothing right: one of another model, or with wrong layer ids."""

    def __init__(self) -> None:
        self.is_useless = False
        self._num_proposals = 0  # at the last judgement
        self._num_accepted = 0
        self._has_warned = False

    def judge(self, head: SourceStats) -> None:
        """Judge the proposals since the last judgement, if they are enough. The first bad judgement is logged."""
        num_proposals, num_accepted = head.num_proposals - self._num_proposals, sum(head.accepted) - self._num_accepted
        if num_proposals < JUDGED_PROPOSALS:
            return
        self._num_proposals, self._num_accepted = head.num_proposals, sum(head.accepted)
        num_tokens = 1 + num_accepted / num_proposals
        self.is_useless = num_tokens < MIN_HEAD_TOKENS
        if self.is_useless and not self._has_warned:
            self._has_warned = True
            logger.warning("draft head useless tokens_per_step=%.2f proposals=%d", num_tokens, num_proposals)


class DraftCollector(Collector):
    """Yields the metrics of this process's speculator; all are 0 without one.

    `read` returns its counters and is called on any thread. With several engines in one process the last one counts.
    """

    def __init__(self) -> None:
        self.read: Callable[[], DraftStats] = lambda: NOTHING
        self.head_alarm = HeadAlarm()

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
        for source in DraftSource:
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
        yield GaugeMetricFamily(
            "weft_spec_draft_layer_idle",
            "1 while sequences leave out the draft layer, because its drafts do not pay",
            stats.is_layer_idle,
        )
        yield GaugeMetricFamily(
            "weft_spec_head_useless",
            f"1 while steps with drafts of the head yield less than {MIN_HEAD_TOKENS} tokens",
            self.head_alarm.is_useless,
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
        COLLECTOR.head_alarm = HeadAlarm()


async def watch_head() -> None:
    """Judge the draft head of the exposed speculator until cancelled."""
    while True:
        await asyncio.sleep(JUDGE_SECONDS)
        COLLECTOR.head_alarm.judge(COLLECTOR.read().sources.get(DraftSource.HEAD, NO_STATS))
