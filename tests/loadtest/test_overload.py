"""Whom a flood refused, and who was let in and left alone."""

from __future__ import annotations

from loadtest.overload import Step

from weft.cli.bench.load import Record

RECORDS = [
    Record(0.0, 0.0, [1.0], 2.0, output_tokens=1),
    Record(0.0, 0.0, [1.0], 20.0, output_tokens=1),
    Record(0.0, 0.0, [], 0.1, error="HTTP 429: too many requests are waiting; try again in 2.5 s"),
    Record(0.0, 0.0, [], 9.0, error="HTTP 504: the deadline passed"),
]


def test_a_refusal_is_told_by_its_status_whatever_it_says() -> None:
    step = Step(1.0, 30.0, 0.0, RECORDS)
    assert step.refused == [RECORDS[2]]
    assert step.late(deadline=15.0) == [RECORDS[1], RECORDS[3]]
