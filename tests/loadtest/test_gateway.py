"""The gateway's benchmark measures what it says: a gateway between real processes, and clients that count."""

from __future__ import annotations

import pytest
from loadtest.gateway.__main__ import Row, Sizes, drive, measure_instant, table
from loadtest.gateway.processes import NoStart, Processes
from loadtest.gateway.stacks import weft


def test_a_gateway_is_measured_in_front_of_a_worker_without_a_model() -> None:
    row, sizes = Row(), Sizes(requests=16, paced_tokens=0, full_tokens=40, full_requests=32)
    with Processes() as processes:
        stack = weft(1)(processes, 0.0)
        measure_instant(stack, row, sizes)
        stack.model = "another"
        with pytest.raises(NoStart, match="404"):
            drive(stack, connections=1, requests=1, max_tokens=1, stream=True)
    assert all((row.latency_ms, row.unary_per_second, row.unary_cpu_us, row.full_per_second, row.full_tokens_per_event))
    assert "| nginx | not here |" in table({"weft": row, "nginx": None})
