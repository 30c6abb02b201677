"""Prompts that a decode worker computes itself, with blocks from the shared store and with logit changes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import torch

from tests.services.attach import Gateway, prompt
from tests.services.fake_store import FakeStore
from tests.services.workers import Worker, start_pair, start_worker
from tests.weft.tiny_llama import Tiny
from weft.asyncio_compat import background_tasks
from weft.request import SamplingParams
from weft_services.decode import service
from weft_services.decode.service import install

PROMPT = prompt(30)


@asynccontextmanager
async def decoding(tiny: Tiny, store: FakeStore) -> AsyncIterator[tuple[Worker, Gateway]]:
    async with start_worker(tiny, "decode-0", install, store=store) as worker, background_tasks() as tasks:
        store.target = worker.place.memory
        gateway = Gateway(worker.address, tasks)
        yield worker, gateway
        await worker.until_idle()
        await gateway.leave()


@pytest.fixture
async def store(tiny: Tiny) -> FakeStore:
    """A store with the first five blocks of the prompt."""
    store = FakeStore()
    async with decoding(tiny, store) as (worker, gateway):
        await gateway.generate(PROMPT)
        assert len(store.keys) == 7, "all full blocks were asked for"
        blocks = worker.engine._loop._pool._blocks_of
        store.source = {key: bytes(worker.place.memory.read(*blocks[key])) for key in store.keys[:5]}
    store.keys.clear()
    return store


async def test_what_the_store_has_is_taken_counted_once_and_gives_the_same_tokens(tiny: Tiny, store: FakeStore) -> None:
    async with decoding(tiny, store) as (worker, gateway):
        for cached, stored in ((20, 20), (28, 0)):
            answer = await gateway.generate(PROMPT)
            assert answer.tokens == tiny.greedy([*PROMPT], len(answer.tokens))
            assert answer.usage is not None
            assert (answer.usage.cached_tokens, answer.usage.store_tokens) == (cached, stored)
            assert answer.usage.prefill_worker_id == "decode-0"
        prefix = worker.place.stats.read().prefix
        assert (prefix.looked_up_tokens, prefix.pool_tokens, prefix.dram_tokens) == (60, 28, 20)


async def test_without_a_full_block_or_without_a_store_nobody_is_asked(tiny: Tiny, store: FakeStore) -> None:
    async with decoding(tiny, store) as (worker, gateway):
        await gateway.generate(PROMPT[:4])
        store.is_connected = False
        answer = await gateway.generate(PROMPT)
        assert answer.tokens == tiny.greedy([*PROMPT], len(answer.tokens))
        assert store.keys == []
        assert worker.place.stats.read().prefix.looked_up_tokens == 34


async def test_a_client_that_leaves_during_the_fetch_leaves_nothing_behind(tiny: Tiny, store: FakeStore) -> None:
    async with decoding(tiny, store) as (worker, gateway):
        store.may_answer.clear()
        key, answer = await gateway.start(PROMPT)
        await store.was_asked.wait()
        await gateway.cancel(key)
        await worker.until_idle()
        assert not answer.has_begun.is_set()
        store.may_answer.set()
        assert (await gateway.generate(PROMPT)).tokens == tiny.greedy([*PROMPT], 8)


async def test_of_a_prompt_that_is_scored_nothing_is_taken_from_anywhere(tiny: Tiny, store: FakeStore) -> None:
    async with decoding(tiny, store) as (worker, gateway):
        await gateway.generate(PROMPT)
        before = worker.place.stats.read().prefix
        answer = await gateway.generate(PROMPT, num_prompt_logprobs=2)
        assert worker.place.stats.read().prefix == before, "nothing was looked for"
        assert answer.tokens == tiny.greedy([*PROMPT], len(answer.tokens))
        assert answer.usage is not None
        assert (answer.usage.cached_tokens, answer.usage.store_tokens) == (0, 0)
        expected = tiny.logits([*PROMPT])[:-1].log_softmax(-1)
        chosen = [value for piece in answer.prompt_logprobs for value in piece.chosen]
        own = expected.gather(-1, torch.tensor(PROMPT[1:])[:, None])[:, 0].tolist()
        assert chosen == pytest.approx(own, abs=1e-4)
        top = [value for piece in answer.prompt_logprobs for value in piece.top]
        assert top == pytest.approx(expected.topk(2).values.flatten().tolist(), abs=1e-4)
        refused = await gateway.generate(PROMPT, worker.address, num_prompt_logprobs=2)
        assert refused.failure is not None
        assert "must be empty with num_prompt_logprobs" in refused.failure.message


async def test_a_prompt_of_many_chunks_that_is_scored_is_no_flood_of_frames(
    tiny: Tiny, store: FakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "MAX_FRAMES", 16)
    long = prompt(180)  # 23 chunks
    async with decoding(tiny, store) as (_, gateway):
        answer = await gateway.generate(long, num_prompt_logprobs=2)
        assert answer.tokens == tiny.greedy([*long], len(answer.tokens))
        assert sum(len(piece.chosen) for piece in answer.prompt_logprobs) == len(long) - 1


async def test_penalties_go_on_where_another_worker_left_off(tiny: Tiny) -> None:
    sampling = SamplingParams(12, ignore_eos=True, frequency_penalty=1.5, repetition_penalty=1.25)
    async with start_pair(tiny) as pair:
        token_ids = prompt(20)
        whole = (await pair.gateway.generate(token_ids, pair.prefill.address, sampling=sampling)).tokens
        assert whole != pair.expected(token_ids)[:12]
        resumed = (*token_ids, *whole[:5])
        rest = await pair.gateway.generate(resumed, pair.prefill.address, sampling=sampling, resumed_tokens=5)
        assert rest.failure is None
        assert [*whole[:5], *rest.tokens] == list(whole)
