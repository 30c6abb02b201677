"""Which prefill requests are accepted, and what the store saves."""

from __future__ import annotations

import dataclasses
from typing import Any

import grpc

from tests.services.attach import prompt
from tests.services.fake_store import FakeStore
from tests.services.prefill.borrower import start_lender
from tests.services.workers import fingerprint_of
from tests.weft.tiny_llama import Tiny
from weft.kv.block_pool import block_keys
from weft.kv.transfer import Accepted, LeaseClosed
from weft.metrics import REGISTRY


def broken_leases() -> float:
    return REGISTRY.get_sample_value("weft_kv_leases_total", {"end": "broken"}) or 0.0


async def test_orders_that_cannot_be_taken_are_refused_by_name(tiny: Tiny) -> None:
    async with start_lender(tiny) as lender:
        mine = fingerprint_of(tiny)
        refusals: list[tuple[dict[str, Any], grpc.StatusCode | None, str]] = [
            ({"prefill_boot_id": "old"}, grpc.StatusCode.FAILED_PRECONDITION, "restarted"),
            ({"fingerprint": dataclasses.replace(mine, kv_dtype="bfloat16")}, None, "kv_dtype: float32 here, bfloat16"),
            ({"fingerprint": dataclasses.replace(mine, block_tokens=64)}, None, "block_tokens"),
            ({"fingerprint": dataclasses.replace(mine, layout="other")}, None, "layout"),
            ({"token_ids": ()}, grpc.StatusCode.INVALID_ARGUMENT, "empty"),
            ({"token_ids": (131,)}, grpc.StatusCode.INVALID_ARGUMENT, "token ids"),
        ]
        num_broken = broken_leases()
        for changes, code, details in refusals:
            borrower = lender.borrower(**({"token_ids": prompt(9)} | changes))
            await borrower.start()
            assert await borrower.status() is (code or grpc.StatusCode.FAILED_PRECONDITION)
            assert details in await borrower.call.details()
        await lender.worker.until_idle()
        assert broken_leases() == num_broken, "nothing was lent, so nothing was broken off"


async def test_a_second_order_with_a_living_key_is_refused(tiny: Tiny) -> None:
    async with start_lender(tiny) as lender:
        borrower = lender.borrower(prompt(9))
        await borrower.until_finished()
        second = lender.borrower(prompt(9), key=borrower.order.key)
        await second.start()
        assert await second.status() is grpc.StatusCode.INVALID_ARGUMENT
        await borrower.done()
        assert await borrower.next() == LeaseClosed(True)


async def test_the_first_message_must_be_an_order(tiny: Tiny) -> None:
    async with start_lender(tiny) as lender:
        borrower = lender.borrower(prompt(9))
        await borrower.renew()
        assert await borrower.status() is grpc.StatusCode.INVALID_ARGUMENT


async def test_done_before_the_end_means_that_nobody_wants_it(tiny: Tiny) -> None:
    async with start_lender(tiny) as lender:
        borrower = lender.borrower(prompt(190))
        await borrower.start()
        assert isinstance(await borrower.next(), Accepted)
        await borrower.done()
        assert await borrower.status() is grpc.StatusCode.CANCELLED
        await lender.worker.until_idle()


async def test_what_the_store_has_is_not_computed(tiny: Tiny) -> None:
    store = FakeStore()
    token_ids = prompt(30)
    async with start_lender(tiny, store) as lender:
        borrower = lender.borrower(token_ids)
        ready, first = await borrower.until_finished()
        blocks = [block for event in ready for block in event.blocks]
        assert len(store.keys) == 7  # all full blocks
        store.source = dict(zip(store.keys[:5], [await borrower.read([block]) for block in blocks], strict=False))
    async with start_lender(tiny, store) as lender:
        store.target = lender.worker.place.memory
        _, second = await lender.borrower(token_ids).until_finished()
        assert second.first_token_id == first.first_token_id
        assert (second.cached_tokens, second.store_tokens) == (20, 20)
        _, third = await lender.borrower(token_ids).until_finished()
        assert (third.cached_tokens, third.store_tokens) == (28, 0)


async def test_the_store_is_asked_for_the_tenants_own_blocks(tiny: Tiny) -> None:
    store, token_ids = FakeStore(), prompt(30)
    async with start_lender(tiny, store) as lender:
        for salt in (b"acme", b""):
            store.keys.clear()
            await lender.borrower(token_ids, cache_salt=salt).until_finished()
            assert list(store.keys) == block_keys(token_ids, 4, salt)[:7]


async def test_a_borrower_that_leaves_during_the_store_fetch(tiny: Tiny) -> None:
    store = FakeStore()
    async with start_lender(tiny, store) as lender:
        store.may_answer.clear()
        borrower = lender.borrower(prompt(30))
        await borrower.start()
        await store.was_asked.wait()
        borrower.call.cancel()
        await lender.worker.until_idle()
