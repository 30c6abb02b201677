"""Whom a flood refused, and who was let in and left alone."""

from __future__ import annotations

from loadtest.overload import Figures, Step, verdicts

from weft.bench.load import Record

RECORDS = [
    Record(0.0, 0.0, [1.0], 2.0, output_tokens=1),
    Record(0.0, 0.0, [1.0], 20.0, output_tokens=1),
    Record(0.0, 0.0, [], 0.1, error="HTTP 429: too many requests are waiting; try again in 2.5 s"),
    Record(0.0, 0.0, [], 9.0, error="HTTP 504: the deadline passed"),
]


def test_a_refusal_is_told_by_its_status_whatever_it_says() -> None:
    step = Step(30.0, 0.0, RECORDS)
    assert step.rejected == [RECORDS[2]]
    assert step.late(deadline=15.0) == [RECORDS[1], RECORDS[3]]


def figures(goodput: float, late: int = 0, rejection_p99: float = 40.0) -> Figures:
    return Figures(8.0, 7.0, goodput, 100, late, 1.0, 2.0, 3.0, 5.0, rejection_p99, 60.0)


def test_every_bar_is_told_and_counts() -> None:
    ramp = [figures(6.0), figures(7.0)]
    assert all(verdicts(ramp, figures(6.4), 20.0).values())
    for flood in (figures(6.2), figures(7.0, late=1), figures(7.0, rejection_p99=51.0)):
        said = verdicts(ramp, flood, 20.0)
        assert [line for line, is_met in said.items() if "SHORT" in line] == [
            line for line, is_met in said.items() if not is_met
        ]
        assert list(said.values()).count(False) == 1


def test_a_mesh_of_which_nothing_was_good_keeps_no_bar_of_its_best() -> None:
    nothing = Figures(8.0, 0.0, 0.0, 100, 0, 1.0, 2.0, 3.0, 5.0, 40.0, 60.0)
    said = verdicts([nothing], nothing, 20.0)
    assert [line.split(";")[1].strip() for line, is_met in said.items() if not is_met] == ["bar 90%: SHORT"]
