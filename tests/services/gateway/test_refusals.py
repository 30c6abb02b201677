"""What is remembered of refusals, whom it is said to, and for how long."""

from __future__ import annotations

from dataclasses import replace

import pytest

from weft.errors import Overloaded
from weft.request import RequestKey
from weft_services.gateway.mesh.placement import RouteQuery
from weft_services.gateway.mesh.refusals import MAX_REMEMBERED, Refusals, RefusedForNow

ASKED = RouteQuery(RequestKey("a"), "model", 100, 20, b"", (), tenant=b"tenant")
FULL = RefusedForNow("others wait", 7.0, 0.5)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_refusal_holds_as_long_as_was_said_and_the_newest_word_counts() -> None:
    clock = Clock()
    refusals = Refusals(clock)
    refusals.check(ASKED)
    refusals.remember(ASKED, FULL)
    clock.now += 0.49
    with pytest.raises(Overloaded, match="others wait") as told:
        refusals.check(ASKED)
    assert told.value.retry_after_seconds == 7.0
    refusals.remember(ASKED, RefusedForNow("others wait", 1.0, 0.25))
    clock.now += 0.25
    refusals.check(ASKED)


@pytest.mark.parametrize(
    "change",
    [
        {"model": "other"},
        {"tenant": b"other"},
        {"priority": 1},
        {"num_prompt_tokens": 99},
        {"max_tokens": 19},
        {"key": RequestKey("a", 1)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_who_may_be_told_something_else_is_not_refused(change: dict[str, object]) -> None:
    refusals = Refusals(Clock())
    refusals.remember(ASKED, FULL)
    refusals.check(replace(ASKED, **change))  # type: ignore[arg-type]
    with pytest.raises(Overloaded):
        refusals.check(replace(ASKED, num_prompt_tokens=200, max_tokens=40, session=b"another"))


def test_as_many_tenants_as_clients_make_up_are_not_all_remembered() -> None:
    refusals = Refusals(Clock())
    asked = [replace(ASKED, tenant=str(number).encode()) for number in range(MAX_REMEMBERED + 1)]
    for query in asked:
        refusals.remember(query, FULL)
    refusals.check(asked[0])
    for query in asked[1:]:
        with pytest.raises(Overloaded):
            refusals.check(query)
