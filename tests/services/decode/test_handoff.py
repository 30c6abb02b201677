"""KV transfers from end to end: the tokens equal those of one engine, with every transport."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import pytest

from tests.services.attach import new_key, prompt
from tests.services.workers import BLOCK_TOKENS, CHUNK_TOKENS, Meddler, Pair, start_pair
from tests.weft.tiny_llama import Tiny
from weft import metrics
from weft.engine.messages import SequenceSpec
from weft.kv.transfer import CopyRange, TransferFailed
from weft.request import Retention, SamplingParams
from weft.rpc.wire import retention_to_wire
from weft_mesh.v1 import common_pb2


def transferred(transport: str) -> float:
    return float(metrics.TRANSFER_BYTES.labels(transport)._value.get())


def block_bytes(pair: Pair) -> int:
    return pair.decode.place.memory.block_bytes


@pytest.mark.parametrize("transport", ["grpc", "mooncake", "local"])
async def test_tokens_are_those_of_a_single_model_and_every_byte_is_counted(tiny: Tiny, transport: str) -> None:
    async with start_pair(tiny, transport) as pair:
        before = transferred(transport)
        for length in (1, 3, 4, 5, 8, 23, 64):
            token_ids = prompt(length, seed=length)
            answer = await pair.gateway.generate(token_ids, pair.prefill.address)
            assert answer.failure is None
            assert answer.tokens == pair.expected(token_ids)
            assert answer.finish_reason == common_pb2.FINISH_REASON_LENGTH
            assert answer.usage is not None
            assert answer.usage.prefill_worker_id == "prefill-0"
            assert answer.usage.cached_tokens == 0
            assert answer.usage.transferred_bytes == -(-length // BLOCK_TOKENS) * block_bytes(pair)
            before += answer.usage.transferred_bytes
            assert transferred(transport) == before
        await pair.until_idle()


async def test_a_fleets_generated_tokens_are_those_of_the_answers(tiny: Tiny) -> None:
    async with start_pair(tiny) as pair:
        answers = [await pair.gateway.generate(prompt(20, seed=seed), pair.prefill.address) for seed in (1, 2)]
        await pair.until_idle()
        generated = pair.prefill.load.generated_tokens + pair.decode.load.generated_tokens
        assert generated == sum(len(answer.tokens) for answer in answers)


async def test_both_workers_hear_how_a_prompt_is_kept_for_whom_and_in_what_turn(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with start_pair(tiny) as pair:
        heard: list[tuple[Retention, bytes, int]] = []
        for engine in (pair.prefill.engine, pair.decode.engine):

            def submit(spec: SequenceSpec, submit: Callable[[SequenceSpec], None] = engine.submit) -> None:
                heard.append((spec.retention, spec.cache_salt, spec.priority))
                submit(spec)

            monkeypatch.setattr(engine, "submit", submit)
        retention = Retention(300, memory_only=True)
        fields = {"retention": retention_to_wire(retention), "cache_salt": b"acme", "priority": 3}
        await pair.gateway.generate(prompt(9), pair.prefill.address, **fields)
        assert heard == [(retention, b"acme", 3)] * 2


async def test_another_tenant_finds_nothing_of_a_prompt_on_either_worker(tiny: Tiny) -> None:
    async with start_pair(tiny) as pair:
        for salt, cached in ((b"acme", 0), (b"acme", 28), (b"other", 0), (b"", 0)):
            answer = await pair.gateway.generate(prompt(30), pair.prefill.address, cache_salt=salt)
            assert answer.tokens == pair.expected(prompt(30))
            assert answer.usage is not None
            assert answer.usage.cached_tokens == cached, salt
        await pair.until_idle()


async def test_a_prompt_of_many_chunks_keeps_its_text(tiny: Tiny) -> None:
    async with start_pair(tiny, "mooncake") as pair:
        token_ids = prompt(20 * CHUNK_TOKENS + 1)
        answer = await pair.gateway.generate(token_ids, pair.prefill.address)
        assert answer.tokens == pair.expected(token_ids)


async def test_what_decode_holds_already_is_not_moved_again(tiny: Tiny) -> None:
    async with start_pair(tiny) as pair:
        first = prompt(32)
        answer = await pair.gateway.generate(first, pair.prefill.address)
        second = (*first, *answer.tokens, *prompt(20, seed=2))
        again = await pair.gateway.generate(second, pair.prefill.address)
        assert again.tokens == pair.expected(second)
        assert again.usage is not None
        # decode keeps the answer's full blocks too, prefill only the prompt's
        held = (len(first) + len(answer.tokens) - 1) // BLOCK_TOKENS
        assert again.usage.transferred_bytes == (len(second) // BLOCK_TOKENS - held) * block_bytes(pair)
        assert again.usage.cached_tokens == len(first)
        await pair.until_idle()


async def test_a_prompt_that_decode_holds_but_for_its_last_block_is_finished_there(tiny: Tiny) -> None:
    meddler = Meddler()
    async with start_pair(tiny, meddler=meddler) as pair:
        token_ids = prompt(32)
        expected = (await pair.gateway.generate(token_ids, pair.prefill.address)).tokens
        num_pulls = meddler.num_pulls
        again = await pair.gateway.generate(token_ids, pair.prefill.address)
        assert again.tokens == expected
        assert again.usage is not None
        assert again.usage.cached_tokens == 28
        assert again.usage.prefill_worker_id == "decode-0"
        assert meddler.num_pulls == num_pulls


class Held(Meddler):
    def __init__(self) -> None:
        super().__init__()
        self.permission = asyncio.Event()

    async def before(self) -> None:
        await self.permission.wait()


async def test_the_first_token_is_told_while_blocks_are_on_their_way(tiny: Tiny) -> None:
    meddler = Held()
    async with start_pair(tiny, meddler=meddler) as pair:
        token_ids = prompt(30)
        _, answer = await pair.gateway.start(token_ids, pair.prefill.address)
        async with asyncio.timeout(20):
            await answer.has_begun.wait()
        assert answer.tokens == pair.expected(token_ids)[:1]
        assert answer.usage is None
        meddler.permission.set()
        async with asyncio.timeout(20):
            await answer.has_ended.wait()
        assert answer.tokens == pair.expected(token_ids)
        assert answer.usage is not None
        assert answer.usage.transferred_bytes == 8 * block_bytes(pair)
        await pair.until_idle()


async def test_a_first_token_that_is_the_last_one_is_told_when_nothing_is_written_any_more(tiny: Tiny) -> None:
    meddler = Held()
    async with start_pair(tiny, meddler=meddler) as pair:
        token_ids, sampling = prompt(30), SamplingParams(max_tokens=1, ignore_eos=True)
        _, short = await pair.gateway.start(token_ids, pair.prefill.address, sampling=sampling)
        _, long = await pair.gateway.start(prompt(31, seed=3), pair.prefill.address)
        async with asyncio.timeout(20):
            await long.has_begun.wait()
        assert not short.has_begun.is_set()
        meddler.permission.set()
        async with asyncio.timeout(20):
            await short.has_ended.wait()
        assert short.tokens == pair.expected(token_ids)[:1]
        assert short.usage is not None
        await long.has_ended.wait()
        await pair.until_idle()


async def test_a_token_that_was_told_stands_when_its_blocks_never_come(tiny: Tiny) -> None:
    class Torn(Held):
        async def after(self, runs: Sequence[CopyRange]) -> None:
            raise TransferFailed("torn")

    meddler = Torn()
    async with start_pair(tiny, meddler=meddler) as pair:
        for length in (30, 32):  # a block of the first token's own, or not
            meddler.permission.clear()
            token_ids = prompt(length, seed=length)
            _, answer = await pair.gateway.start(token_ids, pair.prefill.address)
            async with asyncio.timeout(20):
                await answer.has_begun.wait()
            meddler.permission.set()
            async with asyncio.timeout(20):
                await answer.has_ended.wait()
            assert answer.tokens == pair.expected(token_ids)
            assert answer.usage is not None
            assert answer.usage.prefill_worker_id == "decode-0"
        await pair.until_idle()


async def test_without_a_prefill_worker_the_prompt_is_computed_here(tiny: Tiny) -> None:
    async with start_pair(tiny) as pair:
        token_ids = prompt(21)
        answer = await pair.gateway.generate(token_ids)
        assert answer.tokens == pair.expected(token_ids)
        assert answer.usage is not None
        assert answer.usage.transferred_bytes == 0
        assert answer.usage.prefill_worker_id == "decode-0"


async def test_sampled_text_and_logprobs_are_the_same_with_and_without_a_prefill_worker(tiny: Tiny) -> None:
    sampling = SamplingParams(max_tokens=12, temperature=1.0, top_p=0.9, seed=7, ignore_eos=True, num_logprobs=2)
    async with start_pair(tiny) as pair:
        token_ids = prompt(19)
        local = await pair.gateway.generate(token_ids, sampling=sampling)
        await pair.gateway.generate(prompt(40, seed=9), pair.prefill.address)
        moved = await pair.gateway.generate(prompt(3, seed=3) + token_ids, pair.prefill.address, sampling=sampling)
        again = await pair.gateway.generate(prompt(3, seed=3) + token_ids, sampling=sampling)
        assert moved.tokens == again.tokens
        assert len(local.tokens) == len(moved.tokens) == 12
        deltas = [delta for frame in pair.gateway.frames for delta in frame.deltas if delta.logprobs]
        assert all(len(position.top) == 2 for delta in deltas for position in delta.logprobs)
        assert sum(len(delta.logprobs) for delta in deltas) == 36


async def test_a_step_yields_one_frame_for_all_sequences_of_a_gateway(tiny: Tiny) -> None:
    async with start_pair(tiny) as pair:
        answers = [await pair.gateway.start(prompt(6, seed=seed)) for seed in range(8)]
        for _, answer in answers:
            await answer.has_ended.wait()
        assert len(pair.gateway.frames) < 8 * 8
        assert max(len(frame.deltas) for frame in pair.gateway.frames) > 1


async def test_a_second_start_of_a_living_key_changes_nothing(tiny: Tiny) -> None:
    async with start_pair(tiny) as pair:
        key = new_key()
        _, answer = await pair.gateway.start(prompt(30), pair.prefill.address, key=key)
        await pair.gateway.start(prompt(30), pair.prefill.address, key=key)
        await answer.has_ended.wait()
        assert answer.tokens == pair.expected(prompt(30))
        await pair.until_idle()
