"""Servers beside each other: who is compared with whom, and that one which does not start stands in no one's way."""

from __future__ import annotations

import sys
from pathlib import Path

from loadtest.servers.__main__ import Comparison, loads, parse
from loadtest.servers.contestants import MESH, Contestant, weft
from loadtest.servers.report import FIGURES, Round, ratios, render

NANO = Path(__file__).resolve().parents[2] / "models" / "weft-nano"


def cell(rate: float, milliseconds: float) -> dict[str, object]:
    return {
        **dict.fromkeys(FIGURES, milliseconds),
        "output_tokens_per_second": rate,
        "prompt_tokens_mean": 8.0,
        "cached_share": 0.0,
        "errors": {},
    }


def test_each_figure_is_set_against_the_peer_that_is_best_in_it() -> None:
    told = dict(zip(FIGURES, ratios(cell(50, 30), [cell(100, 60), cell(25, 10)]), strict=True))
    assert told.pop("output_tokens_per_second") == "0.50x"
    assert set(told.values()) == {"3.00x"}


def test_a_second_arrangement_of_ours_is_no_peer() -> None:
    rounds = {name: [Round(1.0, cells={4: cell(50, 30)})] for name in (MESH, f"{MESH}, prefill and decode apart")}
    assert render(rounds, [4], "").row_count == 2


def test_a_server_that_does_not_start_is_named_and_the_others_are_measured() -> None:
    options = parse(["--concurrency", "2", "--requests", "4", "--prompt-tokens", "32", "--output-tokens", "8"])
    options.rounds = 1
    broken = Contestant("broken", lambda port: [sys.executable, "-c", "raise SystemExit('no such option')"])
    comparison = Comparison(loads(options), "some text that is long enough to be cut into prompts " * 40)
    comparison.run([broken, weft(NANO, "float32", {"both": 1}, MESH)])
    assert "no such option" in comparison.missing["broken"]
    (found,) = comparison.rounds[MESH]
    assert found.start_seconds > 0 < found.memory_bytes
    assert found.cells[2]["errors"] == {}
    assert found.cells[2]["output_tokens_per_second"] > 0
