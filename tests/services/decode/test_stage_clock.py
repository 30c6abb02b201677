"""What is told of the time that a sequence spent in its stages."""

from __future__ import annotations

from weft.engine.messages import PromptCounts
from weft.request import PromptUsage
from weft.rpc.wire import usage_to_wire
from weft_services.decode.stage_clock import MAX_US, StageClock


def test_a_prompt_that_took_hours_can_be_told_of() -> None:
    clock = StageClock(3600.0 * 24)
    clock.computed(PromptCounts(num_cached_tokens=0, queue_ms=2000, compute_ms=2 * 3_600_000))
    wire = usage_to_wire(clock.with_times(PromptUsage()))
    assert (wire.routed_us, wire.prefilling_us) == (2_000_000, MAX_US)
