"""When affinity is back after Valkey was killed, and that it is told where it never is."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Iterator

import httpx
import pytest
from loadtest import sessions
from loadtest.sessions import Part, PlacementCounts, until_back


class Looks(PlacementCounts):
    """Ten placements more at each look, so many of them by session."""

    def __init__(self, *by_session: int) -> None:
        super().__init__("")
        self._more, self._seen = iter(by_session), (0, 0)

    async def read(self, client: httpx.AsyncClient) -> tuple[int, int]:
        more = next(self._more, 0)
        self._seen = self._seen[0] + more, self._seen[1] + 10 - more
        return self._seen


@pytest.mark.parametrize(("by_session", "is_back"), [((0, 0, 6), True), ((0, 0, 5), False)])
async def test_affinity_is_back_once_it_is_what_it_was_and_not_when_the_time_is_over(
    monkeypatch: pytest.MonkeyPatch, by_session: tuple[int, ...], is_back: bool
) -> None:
    monkeypatch.setattr(sessions, "POLL_SECONDS", 0.01)
    async with httpx.AsyncClient() as client:
        assert (await until_back(Looks(*by_session), client, 0.6, 0.2) < math.inf) is is_back


def test_a_run_after_which_affinity_is_not_back_does_not_end_well(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    @contextlib.contextmanager
    def mesh(**_: object) -> Iterator[None]:
        yield None

    async def measure(*_: object) -> tuple[list[Part], float]:
        return [], math.inf

    monkeypatch.setattr(sessions, "LocalMesh", mesh)
    monkeypatch.setattr(sessions, "measure", measure)
    monkeypatch.setattr(sys, "argv", ["sessions"])
    with pytest.raises(SystemExit) as ended:
        sessions.main()
    assert ended.value.code
    assert "did not decide again" in capsys.readouterr().out
