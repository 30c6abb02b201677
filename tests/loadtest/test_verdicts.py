"""What long runs say of themselves: a run that went badly never ends well."""

from __future__ import annotations

import contextlib
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
from loadtest import chaos, pauses
from loadtest.answers import Answer, Ask
from loadtest.chaos import Tally, is_sound
from loadtest.processes import BenchError, Processes
from loadtest.soak import Samples, problems

from weft.cli.memory import MIB

MISSING = {"decode-0": 1}


@pytest.mark.parametrize(
    ("ends", "missing", "expected"),
    [
        ({"right": 9_000, "left": 1_000}, {}, True),
        ({"right": 9_990, "failed": 10}, {}, True),
        ({"right": 9_989, "failed": 11}, {}, False),
        ({"failed": 10_000}, {}, False),
        ({"left": 10_000}, {}, False),
        ({}, {}, False),
        ({"right": 10_000}, MISSING, False),
    ],
)
def test_chaos_is_met_only_where_requests_were_answered(
    ends: dict[str, int], missing: dict[str, int], expected: bool
) -> None:
    assert is_sound(Tally(ends=Counter(ends)), missing) is expected


def test_a_wrong_or_a_hung_request_is_never_sound() -> None:
    ends = Counter({"right": 10_000})
    assert not is_sound(Tally(ends=ends, wrong=["one"]), {})
    assert not is_sound(Tally(ends=ends + Counter(hung=1)), {})


def test_chaos_keeps_what_the_mesh_said_most_of_all_where_it_does_not_come_back(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    @contextlib.contextmanager
    def mesh(*_: object, log_path: Path, **__: object) -> Iterator[None]:
        with Processes(log_path) as processes:
            processes.start([sys.executable, "-c", "print('why')"]).wait(30)
            yield

    async def run(*_: object) -> None:
        raise BenchError("a worker does not come back")

    monkeypatch.setattr(chaos, "LocalMesh", mesh)
    monkeypatch.setattr(chaos, "run", run)
    monkeypatch.setattr(sys, "argv", ["chaos", "--log", str(tmp_path / "log")])
    with pytest.raises(SystemExit, match="a worker does not come back"):
        chaos.main()
    assert (tmp_path / "log").read_text() == "why\n"


def grown(mib_an_hour: float, num_samples: int = 100) -> Samples:
    hour = 3600 / num_samples
    values = [(hour * number, 300 + mib_an_hour * number / num_samples) for number in range(num_samples)]
    return defaultdict(list, {"gateway": values, "short-lived": values[:3]})


def test_a_soak_tells_of_memory_that_grows_once_it_was_long_enough() -> None:
    counts = Counter(answered=1000, left=100)
    assert problems(grown(2.0), counts, {}, 120) == []
    assert problems(grown(20.0), counts, {}, 120) == ["gateway grows"]
    assert problems(grown(20.0), counts, {}, 15) == []


def test_a_soak_tells_of_failures_and_of_blocks_that_are_missing() -> None:
    assert problems(grown(0), Counter(answered=9, failed=1), {}, 120) == ["1 requests failed, 9 were answered"]
    assert problems(grown(0), Counter(), {}, 15) == ["0 requests failed, 0 were answered"]
    assert problems(grown(0), Counter(answered=9), MISSING, 15) == ["blocks are missing: {'decode-0': 1}"]


def paused(peak_mib: float, **ends: int) -> pauses.Tally:
    """A run in which a worker of 200 MiB took so much."""
    tally = pauses.Tally(ends=Counter({"right": 100, **ends}))
    tally.memory.first = {"decode-0": 200 * MIB}
    tally.memory.peak["decode-0"] = round(peak_mib * MIB)
    return tally


@pytest.mark.parametrize(
    ("tally", "expected"),
    [
        (paused(259), True),
        (paused(261), False),
        (paused(200, lost=1), False),
        (paused(200, right=0), False),
        (paused(200, **{"gone with the gateway": 9, "no worker for long": 1}), True),
    ],
    ids=["flat", "grown", "lost", "none answered", "counted apart"],
)
def test_pauses_is_met_when_memory_is_flat_and_none_lost(tally: pauses.Tally, expected: bool) -> None:
    assert pauses.is_sound(tally) is expected


@pytest.mark.parametrize(
    ("gone", "back", "seconds", "end"),
    [
        (None, None, 5.0, "lost"),
        (None, None, 31.0, "no worker for long"),
        (103.0, None, 5.0, "gone with the gateway"),
        (103.0, 104.0, 5.0, "gone with the gateway"),
        (90.0, 95.0, 5.0, "lost"),
    ],
    ids=["lost", "waited", "no gateway", "gateway again", "gateway long back"],
)
def test_pauses_counts_what_no_worker_could_answer_apart(
    gone: float | None, back: float | None, seconds: float, end: str
) -> None:
    tally = pauses.Tally()
    tally.gateway_gone_at = tally.gateway_gone_at if gone is None else gone
    tally.gateway_back_at = tally.gateway_back_at if back is None else back
    tally.count(Ask("one", {}), Answer(), Answer(error="503"), 100.0, 100.0 + seconds)
    assert tally.ends == {end: 1}
