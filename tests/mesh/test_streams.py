"""Two prefill and two decode workers, one of which is lost under many streams: every answer is as undisturbed."""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import Iterator
from contextlib import suppress

import httpx
import psutil
import pytest
from loadtest.answers import Answer, Ask, ask, difference, make_asks

from tests.mesh.conftest import Mesh, wait_until
from tests.mesh.oracle import TEXT

pytestmark = pytest.mark.timeout(300)
STREAMS, TOKENS, TRIES = 16, 120, 4
ASKS = make_asks(TEXT * 8, STREAMS, prompt_words=150, max_tokens=TOKENS, seed=4)


@pytest.fixture(scope="module")
def fleet() -> Iterator[Mesh]:
    """Two of each role."""
    # who is told to end moves what it has at once
    running = Mesh("--prefill", "2", "--decode", "2", environment={"WEFT_GRACE_SECONDS": "0.02"})
    try:
        running.wait_ready()
        wait_until("all have joined", lambda: len(running.workers()) == 4)
        yield running
    finally:
        running.stop()


class Trigger:
    """Hits a process when so many pieces have come over all streams."""

    def __init__(self, process: psutil.Process, number: signal.Signals, after: int) -> None:
        self._process, self._number, self._left = process, number, after

    def count(self) -> None:
        """One more."""
        self._left -= 1
        if self._left == 0:
            self._process.send_signal(self._number)

    @property
    def has_fired(self) -> bool:
        """Did it come to that."""
        return self._left <= 0


async def ask_all(mesh: Mesh, trigger: Trigger | None = None) -> list[Answer]:
    """Everything at once."""
    on_piece = trigger.count if trigger else lambda: None
    async with httpx.AsyncClient(base_url=mesh.url, timeout=60, limits=httpx.Limits(max_connections=None)) as client:
        return list(await asyncio.gather(*(ask(client, each, on_piece) for each in ASKS)))


@pytest.fixture(scope="module")
def undisturbed(fleet: Mesh) -> list[Answer]:
    """What every answer must be."""
    answers = asyncio.run(ask_all(fleet))
    assert [answer.error for answer in answers] == [""] * STREAMS
    return answers


def check(asks: list[Ask], expected: list[Answer], answers: list[Answer]) -> None:
    """None is lost, none differs."""
    for each, reference, answer in zip(asks, expected, answers, strict=True):
        assert not answer.error, each.name
        assert difference(reference, answer) == "", each.name


@pytest.mark.parametrize(
    ("role", "number"),
    [
        ("decode", signal.SIGKILL),
        ("decode", signal.SIGSTOP),
        ("decode", signal.SIGTERM),
        ("prefill", signal.SIGKILL),
        ("prefill", signal.SIGSTOP),
        ("prefill", signal.SIGTERM),
    ],
    ids=["decode killed", "decode frozen", "decode drained", "prefill killed", "prefill frozen", "prefill drained"],
)
async def test_every_stream_goes_on(fleet: Mesh, undisturbed: list[Answer], role: str, number: signal.Signals) -> None:
    """A quick worker may have written all its answers before it is hit: then it is hit again."""
    for _ in range(TRIES):
        if await has_moved(fleet, undisturbed, role, number) or role == "prefill":
            return
    pytest.fail("nobody was on it, whenever it was hit")


async def has_moved(fleet: Mesh, undisturbed: list[Answer], role: str, number: signal.Signals) -> bool:
    """Hit one of the role's workers; every answer is right, and in the end all is as it was. Was a stream on it."""
    name, boots = f"{role}-{random.randrange(2)}", fleet.boots()
    # prompts are still being computed while the first pieces come; we read on after a worker has written its last one
    trigger = Trigger(fleet.child(name), number, random.randint(1, TOKENS if role == "decode" else 20))
    moves = fleet.log().count("sequence migrated worker")
    process = fleet.child(name)
    try:
        check(ASKS, undisturbed, await ask_all(fleet, trigger))
        assert trigger.has_fired
    finally:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGCONT)
    if number is not signal.SIGSTOP:
        fleet.wait_for_return(boots, name)
    wait_until("all have joined again", lambda: len(fleet.workers()) == 4)
    fleet.wait_idle()
    return fleet.log().count("sequence migrated worker") > moves
