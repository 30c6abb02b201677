"""From another thread to the loop, in order, and loudly when a consumer fails."""

from __future__ import annotations

import asyncio
import threading

import pytest

from weft import metrics
from weft.asyncio_compat import background_tasks
from weft.engine.messages import EngineLoad, PromptCounts, StepOutput, TokenDelta
from weft.request import RequestKey
from weft.worker.engine_client import EngineEvents

KEY = RequestKey("a")
FIRST, TEXT = TokenDelta(KEY, (7,), prompt=PromptCounts(0, 0, 0)), TokenDelta(KEY, (7,))


def step(num_prompt: int, num_generated: int, seconds: float, *deltas: TokenDelta) -> StepOutput:
    """What it told, and the totals after it."""
    load = EngineLoad(computed_prompt_tokens=num_prompt, generated_tokens=num_generated)
    return StepOutput(load, deltas=list(deltas), step_seconds=seconds)


def emit(feed: EngineEvents, *outputs: StepOutput) -> None:
    """As the engine would, from a thread of its own."""

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
