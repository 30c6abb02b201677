"""From the engine's thread to the loop: every step's output to whoever consumes it, its load to the metrics.

Knows nothing of requests; consumers pick the keys that are theirs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from weft import metrics
from weft.engine.messages import EngineLoad, StepOutput
from weft.tally import NO_WORK

Consumer = Callable[[StepOutput], None]
ComputeListener = Callable[[int, float], None]
metrics.from_zero(metrics.ENGINE_TOKENS, ("prompt", "generated"))


class EngineFeed:
    """`listener` runs on the engine's thread; everything else on the loop that the feed was made in."""

    def __init__(self) -> None:
        # told of every step that was all prompts, to their first tokens maybe: how many tokens, and how long it took
        self.on_computed: ComputeListener | None = None
        self.load = EngineLoad()
        self.work = NO_WORK
        self._loop = asyncio.get_running_loop()
        self._consumers: list[Consumer] = []
        self._broken: asyncio.Future[None] = self._loop.create_future()

    def subscribe(self, consumer: Consumer) -> None:
        """Call `consumer` with every step's output, in order, on the loop."""
        self._consumers.append(consumer)

    def listener(self, output: StepOutput) -> None:
        """For the engine."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._deliver, output)

    async def until_broken(self) -> None:
        """Raises what a consumer raised; a consumer that fails has lost events and cannot go on."""
        await asyncio.shield(self._broken)

    def _deliver(self, output: StepOutput) -> None:
        try:
            self._observe(output)
            for consumer in self._consumers:
                consumer(output)
        except Exception as error:
            if not self._broken.done():
                self._broken.set_exception(error)

    def _observe(self, output: StepOutput) -> None:
        before, load = self.load, output.load
        self.load = load
        if output.step_seconds:
            metrics.STEPS.inc()
            metrics.STEP_SECONDS.observe(output.step_seconds)
            self._measure(before, output)
        metrics.ENGINE_TOKENS.labels("prompt").inc(load.computed_prompt_tokens - before.computed_prompt_tokens)
        metrics.ENGINE_TOKENS.labels("generated").inc(load.generated_tokens - before.generated_tokens)
        _show(load)

    def forget(self) -> None:
        """The engine and its consumers are gone: nothing here keeps them, or counts what they held."""
        self._consumers.clear()
        self.on_computed = None
        _show(EngineLoad())

    def _measure(self, before: EngineLoad, output: StepOutput) -> None:
        num_tokens = output.load.computed_prompt_tokens - before.computed_prompt_tokens
        # a first token comes with its prompt, and whoever waits between two others does not wait for it
        num_of_texts = sum(len(delta.token_ids) for delta in output.deltas if delta.prompt is None)
        self.work = self.work.add(num_tokens, num_of_texts, output.step_seconds)
        if self.on_computed and num_tokens and not num_of_texts:
            self.on_computed(num_tokens, output.step_seconds)


def _show(load: EngineLoad) -> None:
    metrics.SEQUENCES.labels("running").set(load.num_running)
    metrics.SEQUENCES.labels("waiting").set(load.num_waiting)
    metrics.BLOCKS.labels("free").set(load.free_blocks)
    metrics.BLOCKS.labels("cached").set(load.cached_blocks)
    metrics.BLOCKS.labels("active").set(load.active_blocks)
    metrics.BLOCKS.labels("quarantined").set(load.quarantined_blocks)
