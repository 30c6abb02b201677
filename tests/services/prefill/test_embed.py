"""PrefillService.Embed of a real worker, against the hidden states of transformers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
import torch

from tests.services.attach import new_key
from tests.services.decode.test_stalled import found_standing
from tests.services.workers import Worker, start_worker
from tests.weft.tiny_llama import Tiny
from weft.rpc.client import open_channel
from weft.rpc.wire import key_to_wire
from weft_mesh.v1 import prefill_service_pb2 as pb
from weft_mesh.v1.prefill_service_pb2_grpc import PrefillServiceStub
from weft_services.prefill.service import install

PROMPT = [(7 * i) % 100 + 3 for i in range(50)]


@asynccontextmanager
async def embedding_worker(tiny: Tiny) -> AsyncIterator[tuple[Worker, Any]]:
    async with start_worker(tiny, "prefill-0", install) as worker, open_channel(worker.address.address) as channel:
        yield worker, PrefillServiceStub(channel)


def request(worker: Worker, prompt: list[int]) -> pb.PrefillServiceEmbedRequest:
    return pb.PrefillServiceEmbedRequest(
        key=key_to_wire(new_key()), prefill_boot_id=worker.place.boot_id, token_ids=prompt
    )


async def test_prompts_side_by_side_get_the_means_of_transformers(tiny: Tiny) -> None:
    async with embedding_worker(tiny) as (worker, stub):
        prompts = [PROMPT[:length] for length in (1, 3, 8, 9, 50, 50)]
        answers = await asyncio.gather(*(stub.Embed(request(worker, each), timeout=20) for each in prompts))
        oracle: Any = tiny.oracle
        for prompt, answer in zip(prompts, answers, strict=True):
            with torch.inference_mode():
                states = oracle(torch.tensor([prompt]), output_hidden_states=True).hidden_states[-1][0]
            torch.testing.assert_close(torch.tensor(list(answer.values)), states.mean(0), atol=2e-4, rtol=2e-3)
        await worker.until_idle()


async def test_a_caller_that_leaves_leaves_no_blocks_behind(tiny: Tiny) -> None:
    async with embedding_worker(tiny) as (worker, stub):
        calls = [stub.Embed(request(worker, PROMPT * 2), timeout=20) for _ in range(8)]
        await worker.until_load(lambda load: load.num_running + load.num_waiting > 0)
        for call in calls:
            call.cancel()
        await worker.until_idle()


async def test_a_worker_that_leaves_ends_its_embeddings_first_and_takes_no_more(tiny: Tiny) -> None:
    async with embedding_worker(tiny) as (worker, stub):
        calls = [stub.Embed(request(worker, PROMPT * 2), timeout=20) for _ in range(8)]
        await worker.until_load(lambda load: load.num_running + load.num_waiting > 0)
        worker.client.close()
        await worker.client.until_idle()
        await worker.until_idle()
        answers = await asyncio.gather(*calls, return_exceptions=True)
        refused = [answer for answer in answers if isinstance(answer, grpc.aio.AioRpcError)]
        assert len(refused) < len(calls)
        assert {error.details() for error in refused} <= {"this prefill worker is shutting down"}, "who came too late"
        with pytest.raises(grpc.aio.AioRpcError, match="shutting down"):
            await stub.Embed(request(worker, PROMPT), timeout=20)


async def test_an_engine_that_stands_still_gives_its_embeddings_back(tiny: Tiny) -> None:
    async with embedding_worker(tiny) as (worker, stub):
        async with found_standing(worker):
            calls = [stub.Embed(request(worker, PROMPT), timeout=25) for _ in range(2)]
            for answer in await asyncio.gather(*calls, return_exceptions=True):
                assert isinstance(answer, grpc.aio.AioRpcError)
                assert (answer.code(), answer.details()) == (
                    grpc.StatusCode.UNAVAILABLE,
                    "the prefill engine hangs",
                )
        await worker.until_idle()
        assert (await stub.Embed(request(worker, PROMPT), timeout=20)).values


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"prefill_boot_id": "another"}, grpc.StatusCode.FAILED_PRECONDITION),
        ({"token_ids": []}, grpc.StatusCode.INVALID_ARGUMENT),
        ({"token_ids": [5] * 500}, grpc.StatusCode.INVALID_ARGUMENT),
        ({"token_ids": [10_000]}, grpc.StatusCode.INVALID_ARGUMENT),
    ],
)
async def test_what_cannot_be_embedded_is_refused(tiny: Tiny, change: dict[str, Any], code: Any) -> None:
    async with embedding_worker(tiny) as (worker, stub):
        asked = request(worker, PROMPT)
        for name, value in change.items():
            asked.ClearField(name)  # type: ignore[arg-type]
            asked.MergeFrom(pb.PrefillServiceEmbedRequest(**{name: value}))
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await stub.Embed(asked, timeout=10)
        assert refusal.value.code() is code
