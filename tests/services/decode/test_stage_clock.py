"""What is told of the time that a sequence spent in its stages."""

from __future__ import annotations

import pytest

from weft.engine.messages import PromptCounts
from weft.errors import EngineFailed
from weft.request import PromptUsage, RequestKey, SamplingParams
from weft.rpc.wire import usage_to_wire
from weft_services.decode.messages import Outbox, SequenceRequest
from weft_services.decode.sequences import DecodeSequence
from weft_services.decode.stage_clock import MAX_US, StageClock


def test_a_prompt_that_took_hours_can_be_told_of() -> None:
    clock = StageClock(3600.0 * 24)
    clock.computed(PromptCounts(num_cached_tokens=0, queue_ms=2000, compute_ms=2 * 3_600_000))
    wire = usage_to_wire(clock.with_times(PromptUsage()))
    assert (wire.routed_us, wire.prefilling_us) == (2_000_000, MAX_US)


async def test_a_failure_that_came_while_nobody_waited_is_raised() -> None:
    order = SequenceRequest(RequestKey("r"), "boot", None, (1, 2), SamplingParams(1), 60.0)
    sequence = DecodeSequence(order, Outbox(4))
    sequence.end(EngineFailed("the step failed"))
    with pytest.raises(EngineFailed, match="the step failed"):
        await sequence.until_ended()
