"""The gateway's benchmark measures what it says: a gateway between real processes, and clients that count."""

from __future__ import annotations

import pytest
from loadtest.gateway.__main__ import Row, Sizes, main, measure_instant, median_of, named, render, verdicts
from loadtest.gateway.client import Load
from loadtest.gateway.driving import drive
from loadtest.gateway.scaling import Cost, Setting
from loadtest.gateway.scaling import verdicts as scaling_verdicts
from loadtest.gateway.stacks import weft
from loadtest.processes import BenchError, Processes


def test_a_gateway_is_measured_in_front_of_a_worker_without_a_model() -> None:
    # what a process has used is counted in hundredths of a second
    row, sizes = Row(), Sizes(requests=64, paced_tokens=0, full_tokens=40, full_requests=32)
    with Processes() as processes:
        stack = weft(1)(processes, 0.0)
        measure_instant(stack, row, sizes)
        stack.model = "another"
        with pytest.raises(BenchError, match="404"):
            drive(stack, Load(connections=1, requests=1, stream=True))
    assert all((row.latency_ms, row.unary_per_second, row.unary_cpu_us, row.full_per_second, row.full_tokens_per_event))
    assert row.full_tokens_per_frame == 32  # every step had all clients' sequences
    assert "| nginx |     not here |" in render({"weft": row, "nginx": None})


def test_processes_that_cost_more_than_meshes_of_their_own_do_not_scale() -> None:
    def cost(gateway_us: float) -> Cost:
        return Cost(per_second=200, cpu_us={"gateway": gateway_us}, token_us=40, idle_ms=5, most=1.1)

    costs = {Setting(1, 1): cost(800), Setting(1, 2): cost(1000), Setting(2, 1): cost(990)}
    assert "takes 1.25 times" in scaling_verdicts(costs)
    assert "1.01 and 1.00 times that of as many meshes, bar 1.15: met" in scaling_verdicts(costs)
    assert "SHORT" in scaling_verdicts(costs | {Setting(2, 1): cost(800)})


def test_of_several_runs_the_medians_count() -> None:
    runs = [Row(1.4, full_cpu_us=16.0), Row(1.6, full_cpu_us=14.0), Row(1.2, trouble="did not start")]
    assert median_of(runs) == Row(1.4, full_cpu_us=15.0, trouble="did not start")
    lines = verdicts([*runs, Row(9.9, full_cpu_us=17.0)]).splitlines()
    assert lines[0] == "- request, p50: 1.50 (1.20 to 9.90), bar 1.5 ms: met"
    assert lines[2] == "- CPU a token, full: 16.00 (14.00 to 17.00), bar 15.0 us: SHORT"


def test_what_failed_is_told_and_keeps_no_bar() -> None:
    runs = [Row(1.4, trouble="32 requests failed: HTTP 500"), Row(1.4, trouble="weft: not there\nits log")]
    lines = render({"weft": median_of(runs)}).splitlines()
    assert lines[-1] == "- weft: 32 requests failed: HTTP 500; weft: not there"
    assert "- CPU a token, paced: not measured, bar 60.0 us: SHORT" in verdicts(runs).splitlines()


def test_rows_are_chosen_by_names_that_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    """An unknown one made an empty table, and a name with a comma could not be said."""
    names, told = ["weft", "weft, 2 processes", "nginx"], list[str]()
    assert named("weft, 2 processes", names, told.append) == ["weft, 2 processes"]
    assert named("nginx,weft,weft, 2 processes", names, told.append) == ["nginx", "weft", "weft, 2 processes"]
    assert told == []
    with pytest.raises(SystemExit):
        main(["--only", "weft,nosuch"])
    assert "no row is called 'nosuch'; there are: weft; weft, 2 processes;" in capsys.readouterr().err
