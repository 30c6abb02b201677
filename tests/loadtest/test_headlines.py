"""The page of the headline experiments says what their files say."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from loadtest import disaggregation
from loadtest.fleet.figures import Figures
from loadtest.headlines import FOLDER, HITS, PAGE, SPLIT, main


def simulated(policy: str, of_ideal: float) -> dict[str, float | str]:
    numbers = dict.fromkeys((name for name in Figures.__slots__ if name != "policy"), 0.125)
    return Figures(**{**numbers, "policy": policy, "of_ideal": of_ideal}).as_dict()  # type: ignore[arg-type]


def measured(itl_p90: float) -> disaggregation.Figures:
    return disaggregation.Figures((5.0, itl_p90, 50.0), 100.0, 900.0, 190.0, 700.0, 0)


def test_the_page_holds_both_experiments_and_needs_nothing_else(tmp_path: Path) -> None:
    figures = {"8/32": [simulated("weft", 0.987)], "64/32": [simulated("weft", 0.971), simulated("load only", 0.21)]}
    record = {"trace": "t.jsonl", "machine": "m", "load": 0.95, "figures": figures}
    (tmp_path / HITS).write_text(json.dumps(record))
    options = disaggregation.Options(2, 60.0, 3.0, (64, 64), 0.8, 0.0, (2048, 8), 128)
    sides = {"2 combined": [measured(60.0), measured(64.0)], "prefill + decode": [measured(12.0), measured(12.4)]}
    (tmp_path / SPLIT).write_text(disaggregation.record(sides, options))
    main(["--folder", str(tmp_path)])
    page = (tmp_path / PAGE).read_text()
    for cell in ("98.7%", "97.1%", "21.0%", "62.0", "12.2", "0.20x"):
        assert f"<td>{cell}</td>" in page
    assert not re.search(r"<(script|link|img|iframe)|src=|href=", page)


def test_hits_are_drawn_over_fleets_of_one_cache_and_over_caches_of_one_fleet(tmp_path: Path) -> None:
    figures = {place: [simulated("weft", 0.9)] for place in ("8/32", "64/32", "8/4", "8/0.5")}
    record = {"trace": "t.jsonl", "machine": "m", "load": 0.95, "figures": figures}
    (tmp_path / HITS).write_text(json.dumps(record))
    main(["--folder", str(tmp_path)])
    page = (tmp_path / PAGE).read_text()
    assert page.count("<svg") == 2
    assert "32 million tokens of cache on each</" in page
    ticks = [
        page.index(f">{tick}<", page.index("hits by what the router knows, 8 workers")) for tick in ("0.5", "4", "32")
    ]
    assert ticks == sorted(ticks)


def test_the_committed_page_is_made_of_the_committed_figures(tmp_path: Path) -> None:
    for name in (HITS, SPLIT):
        if (FOLDER / name).exists():
            (tmp_path / name).write_text((FOLDER / name).read_text())
    main(["--folder", str(tmp_path)])
    assert (tmp_path / PAGE).read_text() == (FOLDER / PAGE).read_text()


def test_rounds_are_read_as_they_were_written() -> None:
    options = disaggregation.Options(1, 60.0, 3.0, (64, 64), 0.8, 0.0, (2048, 8), 128)
    sides = {"a": [measured(1.5)], "b": [measured(2.5)]}
    assert disaggregation.recorded(disaggregation.record(sides, options)) == sides
    with pytest.raises(KeyError):
        disaggregation.recorded("{}")


def test_with_no_figures_there_is_no_page(tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        main(["--folder", str(tmp_path)])
