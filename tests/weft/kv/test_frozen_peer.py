"""A real peer that is frozen while it is read: when the pull has ended nothing lands any more, even once it goes on."""

from __future__ import annotations

import asyncio
import ctypes
import json
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager

import pytest

from weft.kv.mooncake import MooncakeTransport
from weft.kv.transfer import CopyRange, Endpoint, KvSource, TransferFailed
from weft.request import RequestKey

SIZE, NUM_RUNS = 16 * 1024 * 1024, 8
LEASE = RequestKey("r")


@asynccontextmanager
async def start_lender() -> AsyncIterator[tuple[asyncio.subprocess.Process, Endpoint]]:
    """Start a process whose memory is full of 7s."""
    command = [sys.executable, "-m", "loadtest.kv.kv_source", str(SIZE)]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    try:
        assert process.stdout is not None
        told = json.loads(await process.stdout.readline())
        yield process, Endpoint("mooncake", told["segment"], told["address"])
    finally:
        process.kill()
        await process.wait()


async def test_nothing_lands_after_the_end_of_a_pull_and_others_are_not_held_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # long enough for the other peer to be read meanwhile
    monkeypatch.setenv("MC_TCP_PROGRESS_TIMEOUT_SEC", "4")
    monkeypatch.setenv("MC_TCP_STATUS_TIMEOUT_SEC", "4")
    memory = (ctypes.c_ubyte * SIZE)()
    address = ctypes.addressof(memory)
    transport = MooncakeTransport("127.0.0.1")
    transport.register(address, SIZE)
    piece = SIZE // NUM_RUNS // 2
    async with start_lender() as (frozen, its), start_lender() as (_, other):
        # first contact, before anything is wrong
        for peer in (its, other):
            await transport.pull(KvSource(peer, "", LEASE), [CopyRange(peer.pool_address, address, 1)], 10)
        memory[0] = 0
        frozen.send_signal(signal.SIGSTOP)
        runs = [CopyRange(its.pool_address + 2 * i * piece, address + 2 * i * piece, piece) for i in range(NUM_RUNS)]
        pulls = [asyncio.create_task(transport.pull(KvSource(its, "", LEASE), runs, 10)) for _ in range(3)]
        # the other peer has threads of its own
        began = time.monotonic()
        await transport.pull(KvSource(other, "", LEASE), [CopyRange(other.pool_address, address + piece, piece)], 10)
        assert not any(pull.done() for pull in pulls), f"{time.monotonic() - began} s"
        assert bytes(memory[piece : 2 * piece]) == b"\x07" * piece
        outcomes = await asyncio.gather(*pulls, return_exceptions=True)
        assert all(isinstance(outcome, TransferFailed) for outcome in outcomes)
        before = bytes(memory)
        frozen.send_signal(signal.SIGCONT)
        await asyncio.sleep(1.0)  # what was seen to land did so within a fifth of that
        assert bytes(memory) == before
        # and it can be read again, once its connections are new
        async with asyncio.timeout(30):
            while not await _is_read(transport.pull(KvSource(its, "", LEASE), runs, 10)):
                pass
        assert memory[2 * (NUM_RUNS - 1) * piece] == 7
    await transport.close()


async def _is_read(pull: Awaitable[None]) -> bool:
    try:
        await pull
    except TransferFailed:
        return False
    return True
