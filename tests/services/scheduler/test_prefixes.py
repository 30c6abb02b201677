"""The prefix index, and lookups in a kvstore: a real servicer over gRPC, and one that fails."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.services.scheduler.fakes import FINGERPRINT, MODEL, Clock, worker_info
from weft.errors import DeadlineExceeded, PeerLost, WeftError
from weft.fleet_types import RouteQuery, WorkerReport
from weft.kv.block_pool import block_keys, fingerprint_digest
from weft.request import RequestKey, WorkerRole
from weft.rpc.server import RpcServer
from weft_mesh.v1 import kvstore_service_pb2_grpc as pb_grpc
from weft_services.kvstore.block_index import BlockReport, PoolIndex, StoredBlock
from weft_services.kvstore.node import NodeStore, StoreAddress
from weft_services.kvstore.service import SERVICE_NAME, KvStoreServicer
from weft_services.scheduler import prefixes
from weft_services.scheduler.affinity import AffinityStore
from weft_services.scheduler.dispatch import Dispatcher
from weft_services.scheduler.prefixes import (
    MAX_LATE,
    MAX_LOOKUPS,
    PAUSE_SECONDS,
    KvStoreClient,
    Locate,
    LocatedPrefix,
    PrefixHolder,
    PrefixIndex,
    PrefixLocator,
)
from weft_services.scheduler.router import Router

DIGEST = fingerprint_digest(FINGERPRINT)
KEYS = tuple(block_keys(range(320), 16))
ALL = LocatedPrefix((PrefixHolder("both-0", "both-0-boot", 4), PrefixHolder("both-1", "another-boot", 20)), 12, 10)


def query(number: int = 0, keys: Sequence[bytes] = KEYS) -> RouteQuery:
    return RouteQuery(RequestKey(f"r{number}"), MODEL, len(keys) * 16 + 1, 8, block_keys=keys)


def fleet(now: float = 0.0) -> Router:
    router = Router(10.0)
    for name in ("both-0", "both-1"):
        worker = router.join(worker_info(name, WorkerRole.BOTH), now)
        router.report(worker, WorkerReport(ready=True, free_blocks=100, cached_blocks=50), now)
    return router


@asynccontextmanager
async def asking(locate: Locate, clock: Callable[[], float] = time.monotonic) -> AsyncIterator[PrefixLocator]:
    locator = PrefixLocator(locate, clock)
    running = asyncio.create_task(locator.run())
    await asyncio.sleep(0)
    try:
        yield locator
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


class Oracle:
    """A kvstore that answers when it is told to, or fails."""

    def __init__(self) -> None:
        self.error: WeftError | None = None
        self.num_asked = 0
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    async def __call__(self, fingerprint: bytes, keys: Sequence[bytes]) -> LocatedPrefix:
        self.num_asked += 1
        await self.may_answer.wait()
        if self.error is not None:
            raise self.error
        assert fingerprint == DIGEST
        return ALL


async def test_located_prefix_counts_for_the_next_decision() -> None:
    router = fleet()
    async with asking(Oracle()) as locator:
        await locator.locate(router.prefixes, query())
    prefixes = router.routing_input(query()).prefixes
    # the other start of both-1 is not this one
    assert {worker.worker_id: tokens for worker, tokens in prefixes.held.items()} == {"both-0": 64}
    assert (prefixes.stored_tokens, prefixes.disk_tokens) == (192, 32)


@pytest.mark.parametrize(("num_stored", "num_in_memory"), [(8, 8), (8, 3), (8, 0), (16, 16), (16, 12), (0, 0)])
def test_latest_store_lookup_counts_by_tier_and_model(num_stored: int, num_in_memory: int) -> None:
    router = fleet()
    for before in (ALL, LocatedPrefix((), 20, 20), LocatedPrefix((), 20, 0)):
        router.prefixes.add_located(DIGEST, KEYS, before)
        router.prefixes.add_located(DIGEST, KEYS, LocatedPrefix((), num_stored, num_in_memory))
        router.prefixes.add_located(b"another model", KEYS, LocatedPrefix((), 20, 10))
        prefixes = router.routing_input(query()).prefixes
        assert prefixes.stored_tokens == 16 * num_stored
        assert prefixes.disk_tokens == 16 * (num_stored - num_in_memory)


async def test_request_follows_the_located_prefix() -> None:
    router = Router(10.0)
    async with asking(Oracle()) as locator:
        dispatcher = Dispatcher(router, AffinityStore("", 60), locator=locator)
        for name in ("both-1", "both-0"):
            worker = dispatcher.join(worker_info(name, WorkerRole.BOTH))
            dispatcher.report(worker, WorkerReport(ready=True, free_blocks=100, cached_blocks=50))
        # as if it had been given much of late: among equals it would be the other's turn
        first = router.fleet.workers()[0]
        first.dispatched_tokens = 1e6
        first.refresh()
        assert (await dispatcher.route(query(0, KEYS[:4]))).decode.worker_id == "both-0"


async def test_late_answers_delay_briefly_and_help_later_requests() -> None:
    router, oracle, clock = fleet(), Oracle(), Clock()
    async with asking(oracle, clock) as locator:
        oracle.may_answer.clear()
        async with asyncio.timeout(10):
            for number in range(2 * MAX_LATE):
                await locator.locate(router.prefixes, query(number))
        assert oracle.num_asked == MAX_LATE
        assert not router.routing_input(query()).prefixes.held
        oracle.may_answer.set()
        await asyncio.sleep(0.01)
        assert router.routing_input(query()).prefixes.stored_tokens == 192


async def test_no_more_questions_than_allowed_are_under_way() -> None:
    router, oracle = fleet(), Oracle()
    async with asking(oracle, Clock()) as locator, asyncio.timeout(10):
        oracle.may_answer.clear()
        await asyncio.gather(*(locator.locate(router.prefixes, query(number)) for number in range(3 * MAX_LOOKUPS)))
        assert oracle.num_asked == MAX_LOOKUPS


@pytest.mark.parametrize(("error", "tokens"), [(PeerLost("gone"), 0), (DeadlineExceeded("slow"), 192)])
async def test_after_a_failure_it_is_left_alone_for_a_while(error: WeftError, tokens: int) -> None:
    router, oracle, clock = fleet(), Oracle(), Clock()
    async with asking(oracle, clock) as locator:
        await locator.locate(router.prefixes, query())
        oracle.error = error
        for number in range(1, 4):
            await locator.locate(router.prefixes, query(number))
        assert oracle.num_asked == 2
        # what a kvstore held that is gone is gone
        assert router.routing_input(query()).prefixes.stored_tokens == tokens
        oracle.error = None
        clock.now += PAUSE_SECONDS
        for number in range(4, 6):
            await locator.locate(router.prefixes, query(number))
        assert oracle.num_asked == 4
        assert router.routing_input(query()).prefixes.stored_tokens == 192


async def test_real_kvstore_may_die_and_return() -> None:
    store, places = NodeStore(StoreAddress("127.0.0.1", "127.0.0.1", 1), _unheard), PoolIndex()
    store.index.add(DIGEST, [StoredBlock(key, 1, 4096, b"", time.time()) for key in KEYS[:10]])
    places.report(BlockReport("both-1", "both-1-boot", DIGEST, 1, True, KEYS[:6], ()))
    first = await _serve(store, places, 0)
    address, router, clock = first[1], fleet(), Clock()
    kvstore = KvStoreClient(address)
    async with asking(kvstore.locate, clock) as locator:
        await _until_known(locator, router, clock)
        assert {worker.worker_id for worker in router.routing_input(query()).prefixes.held} == {"both-1"}
        await first[0].stop(0)
        async with asyncio.timeout(10):
            while router.routing_input(query()).prefixes.stored_tokens:
                clock.now += PAUSE_SECONDS
                await locator.locate(router.prefixes, query())
        again = await _serve(store, places, int(address.rpartition(":")[2]))
        await _until_known(locator, router, clock)
        await again[0].stop(0)
    await kvstore.close()


async def _until_known(locator: PrefixLocator, router: Router, clock: Clock) -> None:
    async with asyncio.timeout(20):
        while router.routing_input(query()).prefixes.stored_tokens != 160:
            clock.now += PAUSE_SECONDS
            await locator.locate(router.prefixes, query())
            await asyncio.sleep(0.01)


async def _serve(store: NodeStore, places: PoolIndex, port: int) -> tuple[RpcServer, str]:
    rpc = RpcServer([SERVICE_NAME])
    pb_grpc.add_KvStoreServiceServicer_to_server(KvStoreServicer(store, places), rpc.server)
    return rpc, await rpc.start("127.0.0.1", port)


async def _unheard(is_ready: bool) -> None:
    """Nobody asks for its health."""


def chain(name: str, length: int) -> list[bytes]:
    return [f"{name}/{number}".encode() for number in range(length)]


def test_the_longest_prefix_of_each_holder_is_found() -> None:
    index: PrefixIndex[str] = PrefixIndex()
    shared, one, two = chain("s", 3), chain("a", 4), chain("b", 2)
    index.add("x", shared + one, 0, 100)
    index.add("y", shared + two, 0, 100)
    assert index.match(shared + one) == {"x": 7, "y": 3}
    assert index.match(shared + two + chain("c", 9)) == {"y": 5, "x": 3}
    assert index.match(chain("other", 3)) == {}


def test_long_prompt_is_found_by_its_continuation_and_sibling() -> None:
    index: PrefixIndex[str] = PrefixIndex()
    prompt = chain("p", 1000)
    index.add("x", prompt, 0, 10_000)
    assert len(index) < 60
    assert index.match([*prompt, b"more"]) == {"x": 1000}
    found = index.match([*prompt[:700], b"else"])["x"]
    assert 700 * 7 / 8 - 1 <= found <= 700


def test_least_recently_used_keys_are_dropped_from_the_end() -> None:
    index: PrefixIndex[str] = PrefixIndex()
    old, new = chain("old", 6), chain("new", 6)
    index.add("x", old, 0, 10)
    index.add("x", new, 0, 10)
    assert index.match(new) == {"x": 6}
    assert index.match(old) == {"x": 4}
    index.add("x", old[:2], 2, 10)
    index.add("x", chain("third", 6), 0, 10)
    assert index.match(old) == {"x": 2}


def test_lost_holder_is_forgotten_and_reports_count() -> None:
    index: PrefixIndex[str] = PrefixIndex()
    index.add("x", chain("a", 4), 0, 10)
    index.add("y", chain("a", 4), 0, 10)
    index.remove("x", chain("a", 4)[2:])
    assert index.match(chain("a", 4)) == {"y": 4, "x": 2}
    index.trim("y", 1)
    assert index.match(chain("a", 4)) == {"x": 2, "y": 1}
    index.forget("x")
    assert index.match(chain("a", 4)) == {"y": 1}


def test_over_all_holders_it_is_bounded() -> None:
    index: PrefixIndex[str] = PrefixIndex(max_keys=50)
    for number in range(40):
        index.add(f"w{number % 4}", chain(str(number), 7), 0, 1000)
        assert len(index) <= 50
    assert index.match(chain("39", 7)) == {"w3": 7}


def test_a_newcomer_gets_its_part_of_a_full_index() -> None:
    index: PrefixIndex[str] = PrefixIndex(max_keys=600)
    for number in range(200):
        index.add("big", chain(f"big {number}", 6), 0, 10_000)
        index.add(f"small-{number % 8}", chain(f"small {number}", 2), 0, 10_000)
    for number in range(8):
        index.add("new", chain(f"new {number}", 6), 0, 10_000)
    assert len(index) == 600
    assert all(index.match(chain(f"new {number}", 6)) == {"new": 6} for number in range(8))
    assert all(index.match(chain(f"small {number}", 2)) for number in range(200)), "none of the small ones lost a key"


def test_over_the_bound_holders_come_to_hold_the_same() -> None:
    index: PrefixIndex[str] = PrefixIndex(max_keys=700)
    for number in range(3000):
        index.add("often" if number % 10 else f"seldom-{number % 60 // 10}", chain(str(number), 5), 0, 10_000)
        if number == 2000:
            index.forget("often")
    held = Counter(holder for number in range(3000) for holder in index.match(chain(str(number), 5)))
    assert len(held) == 7
    assert max(held.values()) <= 1.3 * min(held.values())


EVENTS = st.lists(
    st.tuples(st.sampled_from("xyz"), st.integers(0, 5), st.integers(0, 60), st.booleans()), min_size=1, max_size=30
)


@given(EVENTS)
def test_counts_agree_after_random_changes(events: list[tuple[str, int, int, bool]]) -> None:
    index: PrefixIndex[str] = PrefixIndex(max_keys=120)
    for holder, name, length, leaves in events:
        keys = chain(str(name), length)
        index.add(holder, keys, index.match(keys).get(holder, 0), 40)
        if leaves:
            index.forget(holder)
            assert holder not in index.match(keys)
        elif length:
            assert index.match(keys).get(holder, 0) <= length
    for holder in "xyz":
        index.forget(holder)
    assert len(index) == 0
    assert all(not index.match(chain(str(name), 60)) for name in range(6))


def walked(index: PrefixIndex[str], keys: list[bytes]) -> dict[str, int]:
    """What `match` says, depth by depth and holder by holder."""
    found: dict[str, int] = {}
    last = 0
    for depth in (*prefixes._grid(len(keys)), len(keys) + 1):
        holders = {name for name in "xyz" if depth <= len(keys) and holds(index, name, keys[depth - 1])}
        if not holders:
            before = {name for name in "xyz" if last and holds(index, name, keys[last - 1])}
            for between in range(depth - 1, last, -1):
                here = {name for name in "xyz" if holds(index, name, keys[between - 1])}
                found |= {name: max(between, found.get(name, 0)) for name in here}
                if here and here == before:
                    break
            return found
        found |= dict.fromkeys(holders, depth)
        last = depth
    return found


def holds(index: PrefixIndex[str], holder: str, key: bytes) -> bool:
    return holder in index._held and key in index._held[holder].keys


@given(EVENTS)
def test_match_equals_a_linear_walk(events: list[tuple[str, int, int, bool]]) -> None:
    index: PrefixIndex[str] = PrefixIndex(max_keys=120)
    asked = [chain(str(name), length) for name in range(6) for length in (0, 1, 9, 23, 60)]
    for holder, name, length, leaves in events:
        keys = chain(str(name), length)
        index.add(holder, keys, index.match(keys).get(holder, 0), 40)
        if leaves:
            index.forget(holder)
        for each in asked:
            assert index.match(each) == walked(index, each)
