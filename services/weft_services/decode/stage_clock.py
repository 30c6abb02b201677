"""How long a sequence is in each stage of its life, as far as the decode worker sees it, and how long it may live."""

from __future__ import annotations

import time
from dataclasses import replace

from weft import metrics
from weft.engine.messages import PromptCounts
from weft.request import PromptUsage
from weft.request_stage import RequestStage
from weft.trace import Span

MAX_US = 2**32 - 1  # what the wire takes: more than an hour in one stage
_BEFORE_DECODING = (RequestStage.ROUTED, RequestStage.RESERVED, RequestStage.PREFILLING, RequestStage.TRANSFERRING)


class StageClock:
    """Made when the gateway's order arrives; every stage that is left is counted with its time."""

    def __init__(self, remaining_seconds: float) -> None:
        self.stage = RequestStage.ROUTED
        self._since = time.perf_counter()
        self._deadline = self._since + remaining_seconds
        self._began_ns = time.time_ns()
        self._spent: dict[RequestStage, float] = {}  # in the order in which they were left

    @property
    def remaining_seconds(self) -> float:
        """To the request's deadline."""
        return max(self._deadline - time.perf_counter(), 0.0)

    def reach(self, stage: RequestStage) -> None:
        """The next stage; the same once more changes nothing."""
        if stage is self.stage:
            return
        now = time.perf_counter()
        self._leave(now - self._since)
        self.stage, self._since = stage, now

    def computed(self, counts: PromptCounts) -> None:
        """The engine computed a prompt that nobody waited for: it alone knows when it began."""
        if self.stage is RequestStage.ROUTED:
            self._leave(counts.queue_ms / 1000)
            self.stage = RequestStage.PREFILLING
            self._leave(counts.compute_ms / 1000)
            self.stage, self._since = RequestStage.DECODING, time.perf_counter()

    def with_times(self, usage: PromptUsage) -> PromptUsage:
        """With the time in each stage before this one."""
        routed, reserved, prefilling, transferring = (
            min(round(self._spent.get(stage, 0.0) * 1e6), MAX_US) for stage in _BEFORE_DECODING
        )
        return replace(
            usage, routed_us=routed, reserved_us=reserved, prefilling_us=prefilling, transferring_us=transferring
        )

    def trace(self, span: Span) -> None:
        """Every stage that was left as a part of the span, one after the other as they were."""
        start = self._began_ns
        for stage, seconds in self._spent.items():
            end = start + round(seconds * 1e9)
            span.child(stage.value, start, end)
            start = end

    def _leave(self, seconds: float) -> None:
        metrics.STAGE_SECONDS.labels(self.stage).observe(seconds)
        self._spent[self.stage] = self._spent.get(self.stage, 0.0) + seconds
