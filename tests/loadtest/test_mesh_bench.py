"""What the mesh's benchmark makes of several rounds."""

from __future__ import annotations

import math

from loadtest.mesh_bench import median_cell, summarize
from loadtest.openai_client import Sample


def cell(*milliseconds: float) -> dict[str, object]:
    answered = [Sample(ttft=each / 1000, output_tokens=1) for each in milliseconds]
    return summarize(answered or [Sample(error="HTTP 500")], 1.0)


def test_a_round_in_which_nothing_was_answered_has_no_latency_and_counts_in_rates_and_errors() -> None:
    for rounds in ([cell(), cell(5), cell(7)], [cell(5), cell(), cell(7)], [cell(7), cell(5), cell()]):
        median = median_cell(rounds)
        assert math.isclose(median["ttft_ms_p50"], 6.0)
        assert (median["requests_per_second"], median["errors"]) == (1.0, {"HTTP 500": 1})
    assert math.isnan(median_cell([cell()])["ttft_ms_p50"])
