"""Step events on the loop, sequences of a client, and the counters for reports."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from weft import metrics
from weft.asyncio_compat import background_tasks
from weft.engine.messages import (
    EngineLoad,
    PromptCounts,
    PromptProgress,
    SequenceFailed,
    SequenceMode,
    SequenceSpec,
    StepOutput,
    TokenDelta,
)
from weft.errors import EngineFailed, InvalidRequest, PeerLost
from weft.fleet_types import EngineTimeStats, PrefixCacheStats, TransferStats
from weft.kv.block_pool import Tier
from weft.metrics import REGISTRY
from weft.request import DraftCounts, FinishReason, RequestKey, SamplingParams, WorkerRole
from weft.rpc import wire
from weft.worker import engine_client
from weft.worker.engine_client import EngineClient, EngineEvents, EngineSequence, GrammarCompiler, StatsRecorder
from weft_mesh.v1 import scheduler_service_pb2 as pb

KEY = RequestKey("a")
SPEC = SequenceSpec(KEY, (1, 2), SamplingParams(max_tokens=1), SequenceMode.GENERATE)
FIRST, TEXT = TokenDelta(KEY, (7,), prompt=PromptCounts(0, 0, 0)), TokenDelta(KEY, (7,))


def step(num_prompt: int, num_generated: int, seconds: float, *deltas: TokenDelta) -> StepOutput:
    """Return a step with these totals."""
    load = EngineLoad(computed_prompt_tokens=num_prompt, generated_tokens=num_generated)
    return StepOutput(load, deltas=list(deltas), step_seconds=seconds)


def emit(feed: EngineEvents, *outputs: StepOutput) -> None:
    def tell() -> None:
        for output in outputs:
            feed.listener(output)

    thread = threading.Thread(target=tell)
    thread.start()
    thread.join()


async def test_every_consumer_sees_every_step_in_order_on_the_loop() -> None:
    feed = EngineEvents()
    seen: list[tuple[int, int]] = []
    done = asyncio.Event()
    feed.subscribe(lambda output: seen.append((1, output.load.num_running)))
    feed.subscribe(lambda output: seen.append((2, output.load.num_running)))
    feed.subscribe(lambda output: done.set() if output.load.num_running == 3 else None)
    emit(feed, *[StepOutput(EngineLoad(num_running=n)) for n in (1, 2, 3)])
    assert seen == []
    await done.wait()
    assert seen == [(1, 1), (2, 1), (1, 2), (2, 2), (1, 3), (2, 3)]
    assert feed.load.num_running == 3


async def test_totals_become_counters() -> None:
    feed = EngineEvents()
    before = metrics.ENGINE_TOKENS.labels("generated")._value.get()
    done = asyncio.Event()
    feed.subscribe(lambda output: done.set() if output.load.generated_tokens == 9 else None)
    emit(feed, *[StepOutput(EngineLoad(generated_tokens=n), step_seconds=0.1) for n in (4, 9)])
    await done.wait()
    assert metrics.ENGINE_TOKENS.labels("generated")._value.get() == before + 9


async def test_work_is_counted_by_step_and_the_time_of_one_with_both_is_shared_by_tokens() -> None:
    feed = EngineEvents()
    done = asyncio.Event()
    feed.subscribe(lambda output: done.set() if output.load.generated_tokens == 8 else None)
    told_between = step(160, 5, 0.0, *[FIRST] * 3)
    emit(
        feed,
        *(step(100, 0, 0.5), step(130, 2, 0.3, *[TEXT] * 2), step(160, 2, 0.2)),
        *(told_between, step(190, 8, 1.1, *[TEXT] * 3)),
    )
    await done.wait()
    work = feed.engine_time
    assert work.generating_steps == 2
    assert work.generating_seconds == pytest.approx(0.3 + 1.1)
    assert work.computing_seconds == pytest.approx(0.5 + 0.3 * 30 / 32 + 0.2 + 1.1 * 30 / 33)


async def test_drafts_count_as_rows_of_a_step() -> None:
    feed = EngineEvents()
    done = asyncio.Event()
    feed.subscribe(lambda output: done.set() if output.load.generated_tokens == 5 else None)
    drafted = TokenDelta(KEY, (7, 8, 9), drafts=DraftCounts(verified=4, accepted=2))
    emit(feed, step(30, 4, 0.8, drafted, TEXT), step(30, 5, 0.1, TEXT))
    await done.wait()
    work = feed.engine_time
    assert (work.generating_steps, work.generating_sequences, work.generating_tokens) == (2, 3, 5)
    assert work.generating_drafts == 4
    assert work.computing_seconds == pytest.approx(0.8 * 30 / 36)


async def test_a_prompts_first_token_is_no_text_and_its_step_one_of_prompts() -> None:
    feed = EngineEvents()
    computed: list[tuple[int, float]] = []
    feed.on_computed = lambda *each: computed.append(each)
    done = asyncio.Event()
    feed.subscribe(lambda output: done.set() if output.load.generated_tokens == 3 else None)
    emit(feed, step(100, 1, 0.5, FIRST), step(100, 2, 0.1, TEXT), step(150, 3, 0.25, FIRST))
    await done.wait()
    assert computed == [(100, 0.5), (50, 0.25)]
    assert feed.engine_time.generating_steps == 1
    assert feed.engine_time.generating_seconds == pytest.approx(0.1)
    assert feed.engine_time.computing_seconds == pytest.approx(0.75)


async def test_a_consumer_that_fails_breaks_the_feed() -> None:
    feed = EngineEvents()

    def fail(output: StepOutput) -> None:
        raise ValueError("a bug")

    feed.subscribe(fail)
    emit(feed, StepOutput(EngineLoad()), StepOutput(EngineLoad()))
    with pytest.raises(ValueError, match="a bug"):
        await feed.until_broken()


class FakeEngine:
    """Records submitted and cancelled sequences."""

    def __init__(self) -> None:
        self.submitted: list[SequenceSpec] = []
        self.cancelled: list[RequestKey] = []
        self.watchdog = SimpleNamespace(is_hung=False)

    def submit(self, spec: SequenceSpec) -> None:
        self.submitted.append(spec)

    def cancel(self, key: RequestKey) -> None:
        self.cancelled.append(key)


class Scene:
    """A client, its engine, and the events that the engine emits."""

    def __init__(self, on_deltas: Callable[[list[tuple[EngineSequence, TokenDelta]]], None] | None = None) -> None:
        self.engine, self.events = FakeEngine(), EngineEvents()
        engine: Any = self.engine
        self.client = EngineClient[EngineSequence](
            engine, self.events, GrammarCompiler(), WorkerRole.PREFILL, "worker-0", on_deltas
        )

    @contextmanager
    def open(self, key: RequestKey = KEY) -> Iterator[EngineSequence]:
        sequence = EngineSequence(key)
        with self.client.open(sequence):
            yield sequence

    async def emit(self, **events: Any) -> None:
        """Deliver the events of one step."""
        self.events.listener(StepOutput(**events))
        await asyncio.sleep(0)


def progress(num_tokens: int) -> PromptProgress:
    return PromptProgress(KEY, (), num_tokens)


async def test_a_sequence_yields_tokens_before_the_latest_progress() -> None:
    scene = Scene()
    with scene.open() as sequence:
        events = sequence.events()
        await scene.emit(progress=[progress(4)])
        assert await anext(events) == progress(4)
        await scene.emit(progress=[progress(8)])
        await scene.emit(progress=[progress(9)], deltas=[FIRST, TokenDelta(RequestKey("another"), (1,))])
        last = TokenDelta(KEY, (2,), finish_reason=FinishReason.STOP)
        await scene.emit(deltas=[last])
        assert [event async for event in events] == [FIRST, last, progress(9)]
        await sequence.until_ended()


async def test_tokens_of_a_step_go_to_the_listener_at_once() -> None:
    steps: list[list[tuple[EngineSequence, TokenDelta]]] = []
    scene = Scene(steps.append)
    other = RequestKey("b")
    with scene.open() as sequence, scene.open(other) as second:
        deltas = [TEXT, TokenDelta(other, (1,)), TokenDelta(RequestKey("elsewhere"), (1,))]
        await scene.emit(deltas=deltas)
        await scene.emit(deltas=[TokenDelta(KEY, (), finish_reason=FinishReason.LENGTH)])
        assert steps[0] == [*zip((sequence, second), deltas, strict=False)]
        await sequence.until_ended()


@pytest.mark.parametrize("wait", [EngineSequence.until_reserved, EngineSequence.until_ended])
@pytest.mark.parametrize("is_early", [False, True])
async def test_every_wait_raises_the_failure(
    wait: Callable[[EngineSequence], Coroutine[Any, Any, object]], is_early: bool
) -> None:
    scene, failed = Scene(), SequenceFailed(KEY, EngineFailed("the step failed"))
    with scene.open() as sequence:
        await scene.client.submit(sequence, SPEC)
        if is_early:
            await scene.emit(failures=[failed])
        waiting = asyncio.create_task(wait(sequence))
        if not is_early:
            await asyncio.sleep(0)
            await scene.emit(failures=[failed])
        with pytest.raises(EngineFailed, match="the step failed"):
            await waiting
    assert scene.engine.cancelled == [], "the engine has released it already"


@pytest.mark.parametrize(("is_submitted", "cancelled"), [(True, [KEY]), (False, [])])
async def test_a_scope_ends_what_it_has_submitted(is_submitted: bool, cancelled: list[RequestKey]) -> None:
    scene = Scene()
    with scene.open() as sequence:
        if is_submitted:
            await scene.client.submit(sequence, SPEC)
        with pytest.raises(InvalidRequest), scene.open():
            pass
        scene.client.close()
        idle = asyncio.create_task(scene.client.until_idle())
        await asyncio.sleep(0)
        assert not idle.done()
    await idle
    assert scene.engine.cancelled == cancelled
    with pytest.raises(PeerLost, match="shutting down"), scene.open():
        pass


async def test_a_hung_engine_fails_its_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_client, "WATCH_SECONDS", 0.01)
    scene = Scene()
    scene.engine.watchdog.is_hung = True
    async with background_tasks() as tasks:
        with scene.open() as sequence:
            tasks.create_task(scene.client.watch())
            with pytest.raises(PeerLost, match="the prefill engine hangs") as raised:
                await sequence.until_first_token()
    assert raised.value.worker_id == "worker-0"


async def test_background_tasks_end_with_their_scope() -> None:
    ended = asyncio.Event()

    async def forever() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async with background_tasks() as tasks:
        tasks.create_task(forever())
        await asyncio.sleep(0)
    assert ended.is_set()


async def test_a_background_task_that_fails_ends_its_scope() -> None:
    async def fail() -> None:
        raise ValueError("a bug")

    async def scope() -> None:
        async with background_tasks() as tasks:
            tasks.create_task(fail())
            await asyncio.Event().wait()

    with pytest.raises(ExceptionGroup):
        await scope()


def test_sums_survive_the_wire() -> None:
    counted = StatsRecorder()
    counted.on_lookup(100, {Tier.POOL: 32, Tier.DRAM: 16})
    counted.on_lookup(50, {Tier.POOL: 16, Tier.NVME: 8})
    counted.on_fetched({Tier.DRAM: 0.25})
    counted.on_fetched({Tier.DRAM: 0.5, Tier.NVME: 2.0})
    counted.on_transfer("prefill-0", 1000)
    counted.on_transfer("prefill-0", 500)
    counted.on_transfer_failed("prefill-1", "timeout")
    now = replace(counted.read(), engine_time=EngineTimeStats(3, 0.5, 1.5, 7, 9, 4))
    assert now.prefix == PrefixCacheStats(150, 48, 16, 8, 0.75, 2.0)
    assert now.transfers == (TransferStats("prefill-0", 2, 1500), TransferStats("prefill-1", num_failed=1))
    report = pb.WorkerReport(
        prefix=wire.prefix_stats_to_wire(now.prefix),
        hand_offs=wire.transfer_stats_to_wire(now.transfers),
        generating_steps=3,
        generating_seconds=0.5,
        computing_seconds=1.5,
        generating_sequences=7,
        generating_tokens=9,
        generating_drafts=4,
    )
    assert wire.worker_stats_from_wire(pb.WorkerReport.FromString(report.SerializeToString())) == now


def test_the_lender_heard_of_longest_ago_is_forgotten_first() -> None:
    counted = StatsRecorder()
    for number in range(engine_client.MAX_PREFILL_WORKERS):
        counted.on_transfer(f"prefill-{number}", 1)
    counted.on_transfer("prefill-0", 1)
    counted.on_transfer("one-more", 1)
    lenders = {each.prefill_worker_id for each in counted.read().transfers}
    assert len(lenders) == engine_client.MAX_PREFILL_WORKERS
    assert "prefill-0" in lenders
    assert "prefill-1" not in lenders


def test_reasons_are_counted_from_the_start_so_that_the_first_failure_shows_in_an_increase() -> None:
    StatsRecorder().declare_failures(["of this test"])
    assert REGISTRY.get_sample_value("weft_kv_transfer_failures_total", {"reason": "of this test"}) == 0
