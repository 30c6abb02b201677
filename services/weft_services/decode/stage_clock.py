"""Time of a sequence in each stage on the decode worker, and its deadline."""

from __future__ import annotations

import time
from dataclasses import replace

from weft import metrics
from weft.engine.messages import PromptCounts
from weft.request import PromptUsage, RequestStage
from weft.trace import Span

MAX_US = 2**32 - 1  # limit of the wire: more than an hour
_BEFORE_DECODING = (RequestStage.ROUTED, RequestStage.RESERVED, RequestStage.PREFILLING, RequestStage.TRANSFERRING)


class StageClock:
    """Starts when the gateway's request arrives; records the time of every stage that ends."""

    def __init__(self, remaining_seconds: float) -> None:
        self.stage = RequestStage.ROUTED
        self._since = time.perf_counter()
        self._deadline = self._since + remaining_seconds
        self._began_ns = time.time_ns()
        self._spent: dict[RequestStage, float] = {}  # in order

    @property
    def remaining_seconds(self) -> float:
        """Seconds to the request's deadline."""
        return max(self._deadline - time.perf_counter(), 0.0)

    def reach(self, stage: RequestStage) -> None:
        """Enter a stage; repeating the current one changes nothing."""
        if stage is self.stage:
            return
        now = time.perf_counter()
        self._leave(now - self._since)
        self.stage, self._since = stage, now

    def computed(self, counts: PromptCounts) -> None:
        """Record a prompt that the engine computed without waiting for KV; only the engine knows when it started."""
        if self.stage is RequestStage.ROUTED:
            self._leave(counts.queue_ms / 1000)
            self.stage = RequestStage.PREFILLING
            self._leave(counts.compute_ms / 1000)
            self.stage, self._since = RequestStage.DECODING, time.perf_counter()

    def with_times(self, usage: PromptUsage) -> PromptUsage:
        """Return the usage with the time in each stage before decoding."""
        routed, reserved, prefilling, transferring = (
            min(round(self._spent.get(stage, 0.0) * 1e6), MAX_US) for stage in _BEFORE_DECODING
        )
        return replace(
            usage, routed_us=routed, reserved_us=reserved, prefilling_us=prefilling, transferring_us=transferring
        )

    def trace(self, span: Span) -> None:
        """Add every ended stage to the span as a child."""
        start = self._began_ns
        for stage, seconds in self._spent.items():
            end = start + round(seconds * 1e9)
            span.child(stage.value, start, end)
            start = end

    def _leave(self, seconds: float) -> None:
        metrics.STAGE_SECONDS.labels(self.stage).observe(seconds)
        self._spent[self.stage] = self._spent.get(self.stage, 0.0) + seconds
