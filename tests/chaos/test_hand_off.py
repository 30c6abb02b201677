"""Cells inside one process: every stage of a hand-off, held there, and hurt there."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from itertools import count
from typing import Any

import pytest

from tests.chaos.relay import Hurt
from tests.chaos.scene import Scene, scene_of
from tests.services.attach import prompt
from tests.services.workers import start_pair
from tests.weft.tiny_llama import Tiny
from weft.errors import DeadlineExceeded
from weft.request import WorkerAddress
from weft.worker import kv_pull
from weft_services.decode import remote_prefill

# a state: the event of prefill's that is held back
EVENTS = {
    "queued at prefill": "accepted",
    "prefilling": "blocks",
    "computed": "finished",
    "closing": "closing",
}
# or the pull
PULLS = {"first pull": 1, "second pull": 2}
# what is to be reached before the deadline takes longer the later it is, and where Mooncake opens the other side first
EARLY, DEADLINE_MS = ("queued at prefill", "prefilling", "first pull"), 1500
LATE_DEADLINE_MS, FAR_DEADLINE_MS = 5000, 6000
# what is to be reached before the deadline takes longer the later it is, or where Mooncake opens the other side first
SHORT_LEASE_SECONDS, TWICE_LEASE_SECONDS, LEASE_SECONDS = 1.0, 5.0, 30.0


async def client_gone(scene: Scene) -> None:
    """One sequence is cancelled."""
    assert scene.key is not None
    assert scene.answer is not None
    await scene.gateway.cancel(scene.key)
    await scene.forgotten()
    scene.open()
    assert not scene.answer.has_ended.is_set()


async def stream_broken(scene: Scene) -> None:
    """The gateway goes, with all that is its own."""
    await scene.gateway.leave()
    await scene.forgotten()
    scene.open()


async def deadline(scene: Scene) -> None:
    """The time that the victim was started with passes."""
    await scene.expect_failure(DeadlineExceeded.code)
    scene.open()


async def prefill_dies(scene: Scene) -> None:
    """Its listener and all its calls end."""
    await scene.pair.prefill.rpc.stop(0)
    scene.open()
    await scene.expect_text()


async def prefill_restarts(scene: Scene) -> None:
    """Another boot answers at the same port."""
    async with scene.another_boot() as worker:
        scene.open()
        await scene.expect_text()
        token_ids = prompt(33, seed=31)
        stale = await scene.pair.gateway.generate(token_ids, scene.pair.prefill.address)
        assert stale.tokens == scene.pair.expected(token_ids)
        async with asyncio.timeout(20):
            for seed in count(32):  # prompts that nobody has in a cache
                if await _is_lent(scene, worker.address, prompt(33, seed)):
                    break
                await asyncio.sleep(0.1)  # a channel that was refused a moment ago tries again within a second


async def _is_lent(scene: Scene, prefill: WorkerAddress, token_ids: tuple[int, ...]) -> bool:
    """Has a new prompt come from the prefill worker. Its text is right in any case."""
    answer = await scene.pair.gateway.generate(token_ids, prefill)
    assert answer.tokens == scene.pair.expected(token_ids)
    return answer.usage is not None and answer.usage.prefill_worker_id == "prefill-0"


async def silence(scene: Scene) -> None:
    """Longer than the lease; what was held comes after that, and must change nothing."""
    await scene.expect_text()
    scene.open()


async def message_lost(scene: Scene) -> None:
    """Never said."""
    scene.relay.copies = 0
    scene.open()
    await scene.expect_text()


async def message_doubled(scene: Scene) -> None:
    """Said twice."""
    scene.relay.copies = 2
    scene.open()
    await scene.expect_text()


async def said_once_more_or_never(scene: Scene) -> None:
    """What decode says; the relay sees to that."""
    await scene.expect_text()
    assert scene.answer is not None
    assert scene.answer.usage is not None
    is_lent = all(scene.relay.said.values())
    assert scene.answer.usage.prefill_worker_id == ("prefill-0" if is_lent else "decode-0")


async def renewals_lost(scene: Scene) -> None:
    """Prefill takes its blocks back, while they are being read."""
    await said_once_more_or_never(scene)
    scene.open()


async def renewals_doubled(scene: Scene) -> None:
    """The pull takes as long as several of them."""
    async with asyncio.timeout(20):
        while scene.relay.num_said["renewal"] < 2:  # noqa: ASYNC110 (they come by the clock)
            await asyncio.sleep(0.01)
    scene.open()
    await said_once_more_or_never(scene)


async def pull_ends(scene: Scene) -> None:
    """As the transport was told."""
    scene.open()
    await scene.expect_text()


async def pull_lands_late(scene: Scene) -> None:
    """Nobody has patience any more when the bytes are written, on blocks that had better be nobody's."""
    await scene.expect_text()
    busy = [await scene.pair.gateway.generate(prompt(60, seed=seed)) for seed in (41, 42)]
    assert scene.pair.decode.load.quarantined_blocks > 0
    scene.open()
    await scene.pair.decode.until_load(lambda load: load.quarantined_blocks == 0)
    assert scene.hurt.num_late_blocks > 0
    for seed, answer in zip((41, 42), busy, strict=True):
        assert answer.tokens == scene.pair.expected(prompt(60, seed=seed))
        again = await scene.pair.gateway.generate(prompt(60, seed=seed))
        assert again.tokens == answer.tokens


Strike = Callable[[Scene], Awaitable[None]]
ANYWHERE: dict[str, Strike] = {
    "client gone": client_gone,
    "stream broken": stream_broken,
    "deadline": deadline,
    "prefill dies": prefill_dies,
    "prefill restarts, same port": prefill_restarts,
}
SAID: dict[str, Strike] = {"silence": silence, "message lost": message_lost, "message doubled": message_doubled}
PULLED: dict[str, tuple[str, Strike]] = {
    "transfer fails": ("fails", pull_ends),
    "transfer damages": ("damages", pull_ends),
    "transfer fails, lands late": ("lands late", pull_lands_late),
}
# what decode says: how often what is said is passed on, and in which state
SENT: dict[str, tuple[dict[str, int], str, Strike]] = {
    "order lost": ({"start": 0}, "asking", said_once_more_or_never),
    "order doubled": ({"start": 2}, "asking", said_once_more_or_never),
    "renewals lost": ({"renewal": 0}, "first pull", renewals_lost),
    "renewals doubled": ({"renewal": 2}, "first pull", renewals_doubled),
    "done lost": ({"done": 0}, "returning", said_once_more_or_never),
    "done doubled": ({"done": 2}, "returning", said_once_more_or_never),
}
CELLS = [
    *((fault, state) for fault in ANYWHERE for state in (*EVENTS, *PULLS, "decoding")),
    *((fault, state) for fault in SAID for state in EVENTS),
    *((fault, state) for fault in PULLED for state in PULLS),
    *((fault, state) for fault, (_, state, _) in SENT.items()),
]
# through Mooncake's Transfer Engine, as between two machines
FAR_CELLS = [
    ("client gone", "first pull"),
    ("deadline", "second pull"),
    ("prefill dies", "second pull"),
    ("message doubled", "prefilling"),
    ("renewals lost", "first pull"),
    *((fault, state) for fault in PULLED for state in PULLS),
]
SIDES = {"decode out of blocks": "num_blocks", "prefill out of blocks": "prefill_blocks"}
SHORTAGES = [(side, fault) for side in SIDES for fault in ("client gone", "deadline", "nothing")]
QUICK = [
    ("client gone", "first pull"),
    ("client gone", "computed"),
    ("stream broken", "prefilling"),
    ("deadline", "second pull"),
    ("prefill dies", "decoding"),
    ("prefill dies", "closing"),
    ("prefill restarts, same port", "first pull"),
    ("silence", "prefilling"),
    ("message lost", "closing"),
    ("message doubled", "prefilling"),
    ("transfer fails", "second pull"),
    ("transfer damages", "first pull"),
    ("transfer fails, lands late", "first pull"),
    ("order doubled", "asking"),
    ("renewals lost", "first pull"),
    ("done lost", "returning"),
]
FAR_QUICK = [("client gone", "first pull"), ("transfer damages", "second pull")]


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_pull, "SAFETY_SECONDS", 0.01)
    monkeypatch.setattr(kv_pull, "SWEEP_SECONDS", 0.01)


async def test_hand_off(tiny: Tiny, cell: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    await _hurt(tiny, cell, "grpc", monkeypatch)


async def test_hand_off_through_mooncake(
    tiny: Tiny, far_cell: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    await _hurt(tiny, far_cell, "mooncake", monkeypatch)


async def _hurt(tiny: Tiny, cell: tuple[str, str], transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fault, state = cell
    transfer_fault, strike = PULLED.get(fault, ("", ANYWHERE.get(fault) or SAID.get(fault)))
    said: dict[str, int] = {}
    if fault in SENT:
        said, _, strike = SENT[fault]
    assert strike is not None
    if fault == "transfer fails, lands late":
        # Mooncake's first pull opens the other side, too
        monkeypatch.setattr(remote_prefill, "PULL_SECONDS", 0.3 if transport == "grpc" else 2.0)
        monkeypatch.setattr(kv_pull, "EXTRA_WAIT_SECONDS", 0.0)
    fields: dict[str, Any] = {"remaining_ms": _deadline_ms(state, transport)} if fault == "deadline" else {}
    hurt = Hurt(transfer_fault, PULLS.get(state, 0))
    async with scene_of(tiny, EVENTS.get(state, ""), hurt, _lease_seconds(fault), transport) as scene:
        scene.relay.said = said
        if state == "decoding":
            await scene.start_decoding(**fields)
        else:
            await scene.start(**fields)
        if state in EVENTS or state in PULLS:
            await scene.reached(scene.relay.hold if state in EVENTS else scene.hurt.hold)
        await strike(scene)


def _deadline_ms(state: str, transport: str) -> int:
    if transport != "grpc":
        return FAR_DEADLINE_MS
    return DEADLINE_MS if state in EARLY else LATE_DEADLINE_MS


def _lease_seconds(fault: str) -> float:
    if fault not in SAID and fault not in SENT:
        return LEASE_SECONDS
    return TWICE_LEASE_SECONDS if fault.endswith(" doubled") else SHORT_LEASE_SECONDS


async def test_either_side_is_out_of_blocks(tiny: Tiny, shortage: tuple[str, str]) -> None:
    """A request waits for the blocks of another, whose pull is held; it gets them, or leaves nothing behind."""
    side, fault = shortage
    hurt = Hurt("", 1)
    sizes: dict[str, Any] = {SIDES[side]: 20}
    async with start_pair(tiny, meddler=hurt, lease_seconds=LEASE_SECONDS, **sizes) as pair:
        hurt.victim = pair.decode
        _, first = await pair.gateway.start(prompt(70, seed=51), pair.prefill.address)
        await hurt.hold.is_reached.wait()
        fields: dict[str, Any] = {"remaining_ms": DEADLINE_MS} if fault == "deadline" else {}
        key, second = await pair.gateway.start(prompt(70, seed=52), pair.prefill.address, **fields)
        await pair.decode.until_load(lambda load: load.num_waiting == 2)
        if fault == "client gone":
            await pair.gateway.cancel(key)
            await pair.decode.until_load(lambda load: load.num_waiting == 1)
        if fault == "deadline":
            await second.has_ended.wait()
            assert second.failure is not None
            assert second.failure.code == DeadlineExceeded.code
        hurt.hold.opening.set()
        for seed, answer in [(51, first)] + ([(52, second)] if fault == "nothing" else []):
            async with asyncio.timeout(20):
                await answer.has_ended.wait()
            assert answer.tokens == pair.expected(prompt(70, seed=seed))
        await pair.until_idle()
        for worker in (pair.prefill, pair.decode):
            assert worker.load.free_blocks + worker.load.cached_blocks == worker.place.memory.num_blocks
