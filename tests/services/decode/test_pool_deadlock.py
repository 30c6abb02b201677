"""Workers of both roles whose full pools wait for each other."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import Any

import grpc
import pytest

from tests.services.attach import Gateway, prompt
from tests.services.workers import start_worker
from tests.weft.tiny_llama import Tiny
from weft.asyncio_compat import background_tasks
from weft.engine.messages import EngineLoad
from weft.worker.engine_client import EngineClient
from weft.worker.process import WorkerContext
from weft_services.decode.remote_prefill import PoolDeadlockDetector
from weft_services.decode.sequences import DecodeSequence
from weft_services.decode.service import install as install_decode
from weft_services.prefill.service import install as install_prefill


def install_both(place: WorkerContext, server: grpc.aio.Server) -> EngineClient[DecodeSequence]:
    install_prefill(place, server)
    return install_decode(place, server)


async def test_two_whose_pools_are_full_of_what_the_other_is_to_compute_do_not_wait_for_ever(tiny: Tiny) -> None:
    sizes: dict[str, Any] = {"num_blocks": 20, "lease_seconds": 0.3}
    async with AsyncExitStack() as stack:
        one, two = [
            await stack.enter_async_context(start_worker(tiny, name, install_both, **sizes)) for name in ("one", "two")
        ]
        tasks = await stack.enter_async_context(background_tasks())
        gateways = [Gateway(worker.address, tasks) for worker in (one, two)]
        prompts = [prompt(70, seed=seed) for seed in (1, 2)]  # 18 blocks
        starts = zip(gateways, prompts, (two, one), strict=True)
        answers = [(await gateway.start(token_ids, lender.address))[1] for gateway, token_ids, lender in starts]
        for token_ids, answer in zip(prompts, answers, strict=True):
            async with asyncio.timeout(20):
                await answer.has_ended.wait()
            assert answer.tokens == tiny.greedy(list(token_ids), 8)
        for gateway, worker in zip(gateways, (one, two), strict=True):
            await worker.until_idle()
            await gateway.leave()


@pytest.mark.parametrize(
    ("loads", "lasts"),
    [
        ([EngineLoad(num_waiting=3), EngineLoad(num_waiting=3)], True),
        ([EngineLoad(num_waiting=2), EngineLoad(num_waiting=2)], False),
        ([EngineLoad(num_waiting=3), EngineLoad(num_waiting=3, num_running=1)], False),
        ([EngineLoad(num_waiting=3), EngineLoad(num_waiting=3, computed_prompt_tokens=5)], False),
        ([EngineLoad(num_waiting=3), EngineLoad(num_waiting=2), EngineLoad(num_waiting=3)], False),
    ],
)
def test_it_is_one_when_a_lent_prompt_waits_and_nothing_was_computed(loads: list[EngineLoad], lasts: bool) -> None:
    coming = iter(loads)
    standstill = PoolDeadlockDetector(lambda: next(coming), lambda: 2)
    assert [standstill.is_deadlocked() for _ in loads][-1] == lasts
