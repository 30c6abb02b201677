"""Servers beside each other: what is compared with what, and a server that does not start."""

from __future__ import annotations

import math
import sys
from pathlib import Path

from loadtest.servers.__main__ import FIGURES, Cell, Comparison, Round, median_cell, parse, ratios, render
from loadtest.servers.contestants import MESH, Contestant, weft

NANO = Path(__file__).resolve().parents[2] / "models" / "weft-nano"


def cell(rate: float, milliseconds: float) -> Cell:
    return {**dict.fromkeys(FIGURES, milliseconds), "requests/s": rate, "out tok/s": rate, "prompt": 8.0, "cached": 0.0}


def test_each_figure_is_set_against_the_peer_that_is_best_in_it() -> None:
    found = dict(zip(FIGURES, ratios(cell(50, 30), [cell(100, 60), cell(25, 10)]), strict=True))
    assert {found.pop("out tok/s"), found.pop("requests/s")} == {"0.50x"}
    assert set(found.values()) == {"3.00x"}


def test_a_second_arrangement_of_ours_is_no_peer() -> None:
    apart = f"{MESH}, prefill and decode apart"
    rounds = {name: [Round(1.0, cells={4: cell(50, 30)})] for name in (MESH, apart, "vLLM")}
    assert render({name: rounds[name] for name in (MESH, apart)}, [4]).count("\n") == 3
    assert "| Weft / best peer" in render(rounds, [4])


def test_a_round_without_answers_has_rates_and_no_latency() -> None:
    cells = [cell(5, 5), cell(7, 7), {**cell(0, math.nan), "out tok/s": 0.0, "requests/s": 0.0}]
    assert median_cell(cells) == {**cell(5, 6), "prompt": 8.0, "cached": 0.0}
    assert math.isnan(median_cell(cells[2:])["TTFT p50"])


def test_a_server_that_does_not_start_is_named_and_the_others_are_measured() -> None:
    options = parse(["--concurrency", "2", "--requests", "4", "--prompt-tokens", "32", "--output-tokens", "8"])
    options.rounds = 1
    broken = Contestant("broken", lambda port: [sys.executable, "-c", "raise SystemExit('no such option')"])
    comparison = Comparison(options)
    comparison.run([broken, weft(NANO, "float32", {"both": 1}, MESH)])
    assert "no such option" in comparison.missing["broken"]
    (found,) = comparison.rounds[MESH]
    assert found.start_seconds > 0 < found.memory_bytes
    assert not found.errors
    assert found.cells[2]["out tok/s"] > 0
