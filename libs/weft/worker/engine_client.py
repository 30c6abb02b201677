"""Connects the engine's thread to the event loop: step events and metrics; and compiles grammars for sequences.

Consumers select the events of their own keys.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from weft import metrics
from weft.engine.messages import Constraint, EngineLoad, StepOutput
from weft.errors import Incompatible
from weft.fleet_types import NO_ENGINE_TIME
from weft.grammar import Grammars
from weft.request import Grammar

Consumer = Callable[[StepOutput], None]
ComputeListener = Callable[[int, float], None]
metrics.init_series(metrics.ENGINE_TOKENS, ("prompt", "generated"))


class EngineEvents:
    """`listener` runs on the engine's thread, everything else on the loop that created this object."""

    def __init__(self) -> None:
        # Called after each prefill-only step (first tokens included) with its token count and duration.
        self.on_computed: ComputeListener | None = None
        self.load = EngineLoad()
        self.engine_time = NO_ENGINE_TIME
        self._loop = asyncio.get_running_loop()
        self._consumers: list[Consumer] = []
        self._broken: asyncio.Future[None] = self._loop.create_future()

    def subscribe(self, consumer: Consumer) -> None:
        """Call `consumer` with every step's output, in order, on the loop."""
        self._consumers.append(consumer)

    def listener(self, output: StepOutput) -> None:
        """Receives step outputs on the engine's thread."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._deliver, output)

    async def until_broken(self) -> None:
        """Raise the first exception of a consumer, which has lost events and cannot continue."""
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
        _set_gauges(load)

    def clear(self) -> None:
        """Drop consumers and zero the gauges once the engine has stopped."""
        self._consumers.clear()
        self.on_computed = None
        _set_gauges(EngineLoad())

    def _measure(self, before: EngineLoad, output: StepOutput) -> None:
        num_tokens = output.load.computed_prompt_tokens - before.computed_prompt_tokens
        # A first token belongs to its prompt; sequences between two decode tokens do not wait for it.
        num_of_texts = sum(len(delta.token_ids) for delta in output.deltas if delta.prompt is None)
        self.engine_time = self.engine_time.add(num_tokens, num_of_texts, output.step_seconds)
        if self.on_computed and num_tokens and not num_of_texts:
            self.on_computed(num_tokens, output.step_seconds)


def _set_gauges(load: EngineLoad) -> None:
    metrics.SEQUENCES.labels("running").set(load.num_running)
    metrics.SEQUENCES.labels("waiting").set(load.num_waiting)
    metrics.BLOCKS.labels("free").set(load.free_blocks)
    metrics.BLOCKS.labels("cached").set(load.cached_blocks)
    metrics.BLOCKS.labels("active").set(load.active_blocks)
    metrics.BLOCKS.labels("quarantined").set(load.quarantined_blocks)


class GrammarCompiler:
    """Compiles grammars in a thread. Loads the tokenizer on first use; without one, rejects requests with a grammar."""

    def __init__(self, load: Callable[[], Grammars] | None = None) -> None:
        self._load = load
        self._grammars: Grammars | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar")

    async def compile(self, grammar: Grammar | None) -> Constraint | None:
        """Return the constraint of a grammar; None for None.

        Raises InvalidRequest if it does not compile, Incompatible if it was made for another tokenizer.
        """
        if grammar is None:
            return None
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._open, grammar)

    def close(self) -> None:
        """Cancel compilations that have not started."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _open(self, grammar: Grammar) -> Constraint:
        if self._load is None:
            raise Incompatible("this worker has no tokenizer; set WEFT_MODEL to the model's directory")
        if self._grammars is None:
            self._grammars = self._load()
        if self._grammars.tokenizer_hash != grammar.tokenizer_hash:
            raise Incompatible("the grammar was made for another tokenizer.json than this worker's")
        return self._grammars.compile(grammar.text)
