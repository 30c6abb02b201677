"""Cells with a real kvstore and its Mooncake: a prompt that lies there alone, hurt while prefill gets it.

Before and after each strike another prompt is really fetched: so the store was in use, and is again.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.chaos.relay import Hold
from tests.chaos.scene import ENDLESS, NUM_BLOCKS, OTHER, VICTIM_TOKENS, expect_nothing_amiss
from tests.services.attach import Answer, prompt
from tests.services.kvstore.node import KvStoreProcess, patient_look_ups, until
from tests.services.prefill.borrower import Lender
from tests.services.workers import BLOCK_TOKENS, Pair, start_pair
from tests.weft.tiny_llama import Tiny
from weft.errors import DeadlineExceeded
from weft.kv.block_pool import Tier, block_keys
from weft.kv.transfer import PromptFinished
from weft.request import RequestKey, SamplingParams
from weft.rpc.client import open_channel
from weft.worker import store_client
from weft.worker.store_connection import StoreConnection
from weft_mesh.v1 import prefill_service_pb2_grpc

pytestmark = pytest.mark.timeout(120)
# a state: what prefill asks the store for just then
STATES = {"looking up": "match", "coming up": "promote", "fetching": "get"}
NUM_TOKENS = 45
# a fetch that stands still is given up, but not before the deadline where that is the fault
STALL_SECONDS, DEADLINE_MS, LONG_STALL_SECONDS = 1.0, 1500, 10.0
NUM_STORED = (NUM_TOKENS - 1) // BLOCK_TOKENS * BLOCK_TOKENS
# one more prompt of so many tokens, and no other is left in prefill's pool
PREFILL_BLOCKS = 20
_seeds = count(1000)


def fresh_prompt(num_tokens: int = NUM_TOKENS) -> tuple[int, ...]:
    """The store outlives a cell, so no cell has another's prompts."""
    return prompt(num_tokens, seed=next(_seeds))


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KvStoreProcess]:
    """With a disk; every cell leaves it whole."""
    node = KvStoreProcess(WEFT_DISK_PATH=str(tmp_path_factory.mktemp("disk")))
    node.start()
    yield node
    node.stop()


@pytest.fixture
def kvstore(shared: KvStoreProcess) -> KvStoreProcess:
    """Whole also where the cell before has failed."""
    if shared.process.poll() is not None:
        shared.start()
    for process in (shared.process, *shared.process.children(recursive=True)):
        process.resume()
    return shared


@dataclass
class Scene:
    """`hold`: where the victim waits before it asks the store."""

    pair: Pair
    kvstore: KvStoreProcess
    lender: Lender
    hold: Hold
    victim: tuple[int, ...]
    key: RequestKey | None = None
    answer: Answer | None = None

    @property
    def link(self) -> StoreConnection:
        """Prefill's."""
        link = self.pair.prefill.place.store._connector.connection
        assert link is not None
        return link

    async def lent(self, token_ids: Sequence[int]) -> PromptFinished:
        """A prompt through prefill alone, to the end of its lease."""
        borrower = self.lender.borrower(token_ids)
        _, finished = await borrower.until_finished()
        await borrower.done()
        await borrower.status()
        await self.pair.prefill.until_idle()  # what is put is held until it is there
        return finished

    async def stored(self, token_ids: Sequence[int]) -> None:
        """In the store, and in no pool."""
        await self.lent(token_ids)
        await self.lent(fresh_prompt(PREFILL_BLOCKS * BLOCK_TOKENS - 1))

    async def expect_in_use(self) -> None:
        """A prompt is put and got."""
        await until("prefill has its store", lambda: self.pair.prefill.place.store.is_connected)
        token_ids = fresh_prompt()
        with patient_look_ups():
            await self.stored(token_ids)
            finished = await self.lent(token_ids)
        assert (finished.cached_tokens, finished.store_tokens) == (NUM_STORED, NUM_STORED)

    async def leave_memory(self) -> None:
        """The victim lies on the disk alone."""
        store, keys = self.pair.prefill.place.store, block_keys(self.victim, BLOCK_TOKENS, b"")
        tiers: list[Tier] = []
        for _ in range(5):  # what is put goes down in the background, and may not have been there yet
            boot_id = self.link.boot_id
            self.kvstore.master.kill()
            await self.until_another_start(boot_id)
            with patient_look_ups():
                tiers = [match.tier for match in (await self.link.match(store._fingerprint, keys))[0]]
            if tiers == [Tier.NVME] * (NUM_STORED // BLOCK_TOKENS):
                return
            await self.stored(self.victim)
        raise AssertionError(f"on the disk: {tiers}")

    async def until_another_start(self, boot_id: str) -> None:
        """Prefill uses a later start of the store."""
        store = self.pair.prefill.place.store
        await until("the store is back", lambda: store.is_connected and self.link.boot_id != boot_id)

    async def ended(self) -> Answer:
        """The victim's answer, once it is whole."""
        assert self.answer is not None
        async with asyncio.timeout(20):
            await self.answer.has_ended.wait()
        return self.answer

    async def expect_computed(self) -> None:
        """The victim goes on without the store, and ends well."""
        self.hold.opening.set()
        answer = await self.ended()
        assert answer.failure is None, answer.failure
        assert answer.tokens == self.pair.expected(self.victim, VICTIM_TOKENS)
        assert answer.usage is not None
        assert (answer.usage.prefill_worker_id, answer.usage.store_tokens) == ("prefill-0", 0)


def _family(node: KvStoreProcess) -> list[psutil.Process]:
    return [node.process, node.master, node.owner]


async def frozen(scene: Scene) -> None:
    """All of it, until the victim has been served."""
    family = _family(scene.kvstore)
    for process in family:
        process.suspend()
    await scene.expect_computed()
    for process in family:
        process.resume()


async def dead(scene: Scene) -> None:
    """All of it; then it is started again."""
    boot_id, children = scene.link.boot_id, scene.kvstore.kill()
    await scene.expect_computed()
    await asyncio.to_thread(psutil.wait_procs, children, 10)
    await asyncio.to_thread(scene.kvstore.start)
    await scene.until_another_start(boot_id)


async def emptied(scene: Scene) -> None:
    """Its master dies, and with it all that was in memory."""
    boot_id = scene.link.boot_id
    scene.kvstore.master.kill()
    await scene.expect_computed()
    await scene.until_another_start(boot_id)


async def client_gone(scene: Scene) -> None:
    """What is still written then had better be nobody's."""
    assert scene.key is not None
    assert scene.answer is not None
    await scene.pair.gateway.cancel(scene.key)
    await scene.pair.prefill.until_idle()
    assert not scene.answer.has_begun.is_set()


async def deadline(scene: Scene) -> None:
    """The time that the victim was started with passes."""
    failure = (await scene.ended()).failure
    assert failure is not None
    assert failure.code == DeadlineExceeded.code
    await scene.pair.prefill.until_idle()


FAULTS: dict[str, Callable[[Scene], Awaitable[None]]] = {
    "kvstore frozen": frozen,
    "kvstore dead": dead,
    "kvstore emptied": emptied,
    "client gone": client_gone,
    "deadline": deadline,
}
CELLS = [
    *((fault, "fetching") for fault in FAULTS),
    *((fault, "looking up") for fault in FAULTS if fault != "deadline"),
    ("kvstore frozen", "coming up"),
]
QUICK = [("kvstore frozen", "fetching"), ("kvstore frozen", "coming up")]


async def test_store(
    tiny: Tiny, kvstore: KvStoreProcess, store_cell: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fault, state = store_cell
    stall_seconds = LONG_STALL_SECONDS if fault == "deadline" else STALL_SECONDS
    monkeypatch.setattr(store_client, "STALL_SECONDS", stall_seconds)
    fields: dict[str, Any] = {"remaining_ms": DEADLINE_MS} if fault == "deadline" else {}
    async with _scene(tiny, kvstore) as scene:
        await scene.stored(scene.victim)
        if state == "coming up":
            await scene.leave_memory()
        _hold_at(STATES[state], scene.hold, monkeypatch)
        sampling = SamplingParams(max_tokens=VICTIM_TOKENS, ignore_eos=True)
        scene.key, scene.answer = await scene.pair.gateway.start(
            scene.victim, scene.pair.prefill.address, sampling=sampling, **fields
        )
        async with asyncio.timeout(20):
            await scene.hold.is_reached.wait()
        owner = kvstore.owner
        if state == "fetching":
            await _until_under_way(scene, owner)
        await FAULTS[fault](scene)
        scene.hold.opening.set()
        if owner.is_running():
            owner.resume()


@asynccontextmanager
async def _scene(tiny: Tiny, kvstore: KvStoreProcess) -> AsyncIterator[Scene]:
    """A store in use before and after, and somebody beside it who must not notice."""
    async with (
        start_pair(tiny, num_blocks=NUM_BLOCKS, prefill_blocks=PREFILL_BLOCKS, kvstore_addr=kvstore.address) as pair,
        open_channel(pair.prefill.address.address) as channel,
    ):
        lender = Lender(pair.prefill, prefill_service_pb2_grpc.PrefillServiceStub(channel), tiny)
        scene = Scene(pair, kvstore, lender, Hold(), fresh_prompt())
        await scene.expect_in_use()
        _, bystander = await pair.gateway.start(OTHER, sampling=ENDLESS)
        yield scene
        async with asyncio.timeout(20):
            await bystander.has_ended.wait()
        await expect_nothing_amiss(pair, bystander, scene.victim)
        await scene.expect_in_use()


def _hold_at(question: str, hold: Hold, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next one of its kind waits; later ones do not."""
    ask = getattr(StoreConnection, question)

    async def held(link: StoreConnection, *arguments: Any) -> Any:
        if not hold.is_reached.is_set():
            await hold.stop()
        return await ask(link, *arguments)

    monkeypatch.setattr(StoreConnection, question, held)


async def _until_under_way(scene: Scene, owner: psutil.Process) -> None:
    """The blocks are being read from the memory's owner, who stands."""
    link = scene.link
    owner.suspend()
    await until("all its threads stand", lambda: _stands(owner))
    scene.hold.opening.set()
    await until("the read was begun", lambda: link._last_read is not None and not link._last_read.done())


def _stands(process: psutil.Process) -> bool:
    """The signal has come to every thread: one that still ran could yet answer the read."""
    stats = [path.read_text() for path in Path(f"/proc/{process.pid}/task").glob("*/stat")]
    return bool(stats) and all(stat.rpartition(")")[2].split()[0] == "T" for stat in stats)
