"""A worker's whole process in the test's loop: boot, health, joining, the engine's death, SIGTERM."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.services.attach import GREEDY, Gateway, prompt
from tests.services.scheduler.fakes import serving
from tests.services.worker_processes import start_process
from tests.weft.tiny_llama import Tiny
from weft.asyncio_compat import background_tasks
from weft.engine.runner import ModelRunner
from weft.errors import EngineFailed
from weft.model.config import read_config
from weft.options import WeightFormat
from weft.request import SamplingParams, WorkerAddress
from weft.rpc.server import SERVING, RpcServer
from weft_kernels.linear.packed12 import Packed12, pack_12
from weft_kernels.native import native
from weft_kernels.sampling import SAMPLING_VERSION
from weft_mesh.v1 import common_pb2, prefill_service_pb2_grpc
from weft_services.decode.service import DECODE_ROLE as DECODE
from weft_services.gateway.mesh.fleet import FleetWatcher
from weft_services.gateway.mesh.scheduler_client import SchedulerClient
from weft_services.prefill.service import PREFILL_ROLE as PREFILL
from weft_services.scheduler.affinity import AffinityStore


async def test_a_worker_serves_once_it_has_joined(tiny: Tiny) -> None:
    async with start_process(tiny) as process:
        assert await process.health() != SERVING
        await process.until_serving()
        assert (process.hello.model, process.hello.num_blocks, process.hello.transport) == ("tiny", 32, "grpc")
        assert process.hello.fingerprint.weights_hash == process.peers.image.weights_hash
        assert (process.hello.max_context_tokens, process.hello.sampling_version) == (128, SAMPLING_VERSION)
        async with background_tasks() as tasks:
            gateway = Gateway(process.address, tasks)
            assert (await gateway.generate(prompt(9))).tokens == tiny.greedy(list(prompt(9)), GREEDY.max_tokens)
            await gateway.leave()


async def test_a_worker_is_announced_while_it_loads_and_no_more_once_it_has_joined(tiny: Tiny) -> None:
    async with start_process(tiny) as process:
        peers = process.peers
        async with asyncio.timeout(20):
            while (told := await peers.announced.get()).phase != "joining":
                pass
            assert (told.worker_id, told.role, told.model) == ("decode-7", common_pb2.WORKER_ROLE_DECODE, "tiny")
            assert not peers.announcement_ended.is_set()
            await process.until_serving()
            await peers.announcement_ended.wait()


async def test_resident_weights_give_the_tokens_of_plain_ones(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed: list[Packed12] = []

    def pack(library: ctypes.CDLL, panels: torch.Tensor) -> Packed12 | None:
        if (found := pack_12(library, panels)) is not None:
            packed.append(found)
        return found

    monkeypatch.setattr("weft_kernels.linear.pack_12", pack)
    half = as_bfloat16(tiny, tmp_path)
    asked = list(prompt(23))
    for form in WeightFormat:
        packed.clear()
        async with start_process(half, weight_format=form) as process, background_tasks() as tasks:
            await process.until_serving()
            gateway = Gateway(process.address, tasks)
            answer = await gateway.generate(tuple(asked))
            assert answer.tokens == half.greedy(asked, GREEDY.max_tokens)
            await gateway.leave()
        # qkv, output, gate and up, down of each layer; the head
        count = 4 * half.config.num_layers + 1 if native() else 0
        assert len(packed) == (0 if form is WeightFormat.PLAIN else count)


def as_bfloat16(tiny: Tiny, directory: Path) -> Tiny:
    """Its weights rounded; the oracle computes with the same ones, in float32."""
    deepcopy(tiny.oracle).to(torch.bfloat16).save_pretrained(directory)
    oracle = type(tiny.oracle).from_pretrained(directory, dtype=torch.float32)
    oracle.eval()
    return Tiny(oracle, directory, read_config(directory))


class Silent(prefill_service_pb2_grpc.PrefillServiceServicer):
    """A prefill worker that takes orders and never says a word."""

    async def Prefill(self, request_iterator: Any, context: Any) -> AsyncIterator[Any]:
        await asyncio.Event().wait()
        yield

    async def Embed(self, request: Any, context: Any) -> Any:
        raise AssertionError("nobody asks")

    async def ReadBlocks(self, request: Any, context: Any) -> AsyncIterator[Any]:
        raise AssertionError("nobody asks")
        yield


@asynccontextmanager
async def silent_prefill() -> AsyncIterator[WorkerAddress]:
    """One that listens."""
    rpc = RpcServer([])
    prefill_service_pb2_grpc.add_PrefillServiceServicer_to_server(Silent(), rpc.server)
    try:
        yield WorkerAddress("prefill-0", "boot", await rpc.start("127.0.0.1", 0))
    finally:
        await rpc.stop(0)


async def test_an_exhausted_pool_is_told_to_probes_and_by_way_of_the_scheduler_to_the_gateway(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weft.worker.process.EXHAUSTED_SECONDS", 0.1)
    monkeypatch.setattr("weft.worker.process.WATCH_SECONDS", 0.05)
    async with serving(AffinityStore("", 60)) as scheduler, silent_prefill() as silent, background_tasks() as tasks:
        # what the gateway answers to /ready
        watch = FleetWatcher(SchedulerClient(scheduler.address), ["tiny"])
        options: dict[str, Any] = {"posts": (PREFILL, DECODE), "scheduler": scheduler.address, "lease_seconds": 30.0}
        async with start_process(tiny, **options) as process:
            await process.until_serving()
            await until_watched(watch, is_ready=True)
            gateway = Gateway(process.address, tasks)
            # all 32 blocks, held for blocks that never come
            key, _ = await gateway.start(prompt(127), silent, sampling=SamplingParams(max_tokens=1))
            await until_watched(watch, is_ready=False)
            assert set(watch.reasons) == {"no prefill worker is ready", "no decode worker is ready"}
            assert await process.health() != SERVING
            await gateway.cancel(key)
            await until_watched(watch, is_ready=True)
            assert await process.health() == SERVING
            await gateway.leave()


async def until_watched(watch: FleetWatcher, is_ready: bool) -> None:
    """As the gateway sees it."""
    async with asyncio.timeout(20):
        while watch.is_ready != is_ready:
            await asyncio.sleep(0.02)
            await watch.poll()


async def test_sigterm_says_goodbye_and_lets_what_lives_end(tiny: Tiny) -> None:
    async with start_process(tiny) as process, background_tasks() as tasks:
        await process.until_serving()
        gateway = Gateway(process.address, tasks)
        _, answer = await gateway.start(prompt(40), sampling=GREEDY)
        await answer.has_begun.wait()
        os.kill(os.getpid(), signal.SIGTERM)
        await answer.has_ended.wait()
        assert answer.tokens == tiny.greedy(list(prompt(40)), GREEDY.max_tokens)
        await process.task
        reports = [process.peers.said.get_nowait().report for _ in range(process.peers.said.qsize())]
        assert not reports[-1].ready


async def test_the_end_of_the_grace_cuts_off(tiny: Tiny, caplog: pytest.LogCaptureFixture) -> None:
    options: dict[str, Any] = {"grace_seconds": 0.05, "lease_seconds": 30.0}
    async with silent_prefill() as silent, start_process(tiny, **options) as process, background_tasks() as tasks:
        await process.until_serving()
        gateway = Gateway(process.address, tasks)
        await gateway.start(prompt(20), silent)  # whose blocks never come
        assert (await gateway.generate(prompt(6))).tokens == tiny.greedy(list(prompt(6)), GREEDY.max_tokens)
        os.kill(os.getpid(), signal.SIGTERM)
        async with asyncio.timeout(20):
            await process.task
        await gateway.leave()
    assert "requests aborted" in caplog.text


async def test_a_dead_engine_ends_the_process_with_an_error(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    async with start_process(tiny) as process, background_tasks() as tasks:
        await process.until_serving()

        def explode(runner: ModelRunner, works: Sequence[object]) -> None:
            raise RuntimeError("the device is gone")

        monkeypatch.setattr(ModelRunner, "launch", explode)
        gateway = Gateway(process.address, tasks)
        answer = await gateway.generate(prompt(9))
        assert answer.failure is not None
        assert (answer.failure.code, answer.failure.worker_id) == (EngineFailed.code, "decode-7")
        assert "device" not in answer.failure.message
        with pytest.raises(ExceptionGroup) as raised:
            await process.task
        assert raised.value.subgroup(EngineFailed) is not None
        await gateway.leave()


async def test_workers_that_hold_both_roles_compute_for_themselves_and_for_each_other(tiny: Tiny) -> None:
    both = (PREFILL, DECODE)
    async with start_process(tiny, posts=both, name="a") as a, start_process(tiny, posts=both, name="b") as b:
        for process in (a, b):
            assert process.hello.role == common_pb2.WORKER_ROLE_BOTH
            await process.until_serving()
        async with background_tasks() as tasks:
            at_a, at_b = Gateway(a.address, tasks), Gateway(b.address, tasks)
            prompts = [prompt(40, seed=1), prompt(33, seed=2), prompt(21, seed=3)]
            answers = [
                (await at_a.start(prompts[0], sampling=GREEDY))[1],
                (await at_a.start(prompts[1], sampling=GREEDY, prefill=b.address))[1],
                (await at_b.start(prompts[2], sampling=GREEDY, prefill=a.address))[1],
            ]
            for token_ids, answer in zip(prompts, answers, strict=True):
                await answer.has_ended.wait()
                assert answer.tokens == tiny.greedy(list(token_ids), GREEDY.max_tokens)
            usages = [answer.usage for answer in answers]
            assert [usage is not None and usage.transferred_bytes > 0 for usage in usages] == [False, True, True]
            await at_a.leave()
            await at_b.leave()
        # SIGTERM would reach only one of two that share a process
        for process in (a, b):
            process.task.cancel()
        await asyncio.wait({a.task, b.task})
