"""The engine's thread and its public, thread-safe interface. `weft.engine.loop` does the work of each step."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial

from weft.engine.config import EngineConfig, set_thread_niceness
from weft.engine.drafting.drafter import Speculator
from weft.engine.loop import CommandQueue, EngineLoop, Runner
from weft.engine.messages import (
    EngineLoad,
    FirstToken,
    PoolMemory,
    SequenceFailed,
    SequenceMode,
    SequenceSpec,
    StepOutput,
)
from weft.engine.sequence import Sequence
from weft.engine.wait_queue import MAX_PRIORITY
from weft.errors import Cancelled, EngineFailed, InvalidRequest, WeftError
from weft.kv.layer_groups import PagingPolicy
from weft.request import RequestKey, SamplingParams

logger = logging.getLogger(__name__)
STOP_PERIOD_SECONDS = 0.5


class Engine:
    """Public methods are thread-safe and return at once, except `stop`, which waits for the step in flight.

    `listener` is called on the engine's thread and must not block. Commands with unknown keys change nothing.
    """

    def __init__(
        self,
        runner: Runner,
        config: EngineConfig,
        listener: Callable[[StepOutput], None],
        clock: Callable[[], float] = time.monotonic,
        speculator: Speculator | None = None,
    ) -> None:
        self._runner = runner
        self._config = config
        self._listener = listener
        self._clock = clock
        self._loop = EngineLoop(runner, config, listener, clock, speculator)
        self._commands = CommandQueue(config.max_waiting)
        self.watchdog = StepWatchdog(clock)
        self._thread = threading.Thread(target=self._run, name="weft-engine", daemon=True)

    def start(self) -> None:
        """Start the thread; call it only once."""
        self._thread.start()

    def stop(self) -> None:
        """Stop after the current step and wait for it. Live sequences fail with Cancelled.

        Does not wait for a hung step: its thread ends with the process.
        """
        self._commands.close()
        if self._thread.ident is None:
            return
        while self._thread.is_alive() and not self.watchdog.is_hung:
            self._thread.join(STOP_PERIOD_SECONDS)

    @property
    def is_alive(self) -> bool:
        """True between `start` and `stop` or a crash."""
        return self._thread.is_alive() and not self._commands.is_closed

    @property
    def pool_memory(self) -> PoolMemory:
        """Location of the block pool in this process."""
        return self._runner.pool_memory

    @property
    def paging(self) -> PagingPolicy:
        """How the pages of sequences are laid out."""
        return self._config.paging

    @property
    def load(self) -> EngineLoad:
        """Load at the last StepOutput."""
        return self._loop.load

    def submit(self, spec: SequenceSpec) -> None:
        """Run a sequence. Raises InvalidRequest, Overloaded or EngineFailed before anything has begun."""
        validate_spec(spec, self._config)
        self._commands.submit(Sequence(spec, list(spec.token_ids), self._clock()))

    def set_first_token(self, key: RequestKey, first: FirstToken) -> None:
        """Emit the first token of a reserved sequence at once, before its KV has arrived.

        The token stays valid if the KV transfer fails. A token that ends the sequence is emitted only by
        `complete_kv`, because transfers write the blocks until then.
        """
        self._commands.post(partial(self._loop.set_first_token, key, first))

    def complete_kv(
        self,
        key: RequestKey,
        num_ready_tokens: int,
        first: FirstToken | None = None,
        suspect_blocks: Iterable[int] = (),
        num_bare_tokens: int = 0,
    ) -> None:
        """Start a reserved sequence that has the KV of its first `num_ready_tokens` prompt tokens.

        The engine computes the rest. With the whole prompt and its `first` token, the sequence decodes at once.
        `suspect_blocks` may still be written by a transfer: they are replaced, and quarantined until `unquarantine`. To
        abort a sequence with transfers in flight, call this with 0 tokens and its blocks, then `cancel`.
        `num_bare_tokens`: prompt tokens up to the last one with KV that lacks that of the draft layer.
        """
        suspects = tuple(suspect_blocks)
        self._commands.post(partial(self._loop.complete_kv, key, num_ready_tokens, first, suspects, num_bare_tokens))

    def cancel(self, key: RequestKey) -> None:
        """End a sequence in any state. No more events follow for it."""
        self._commands.post(partial(self._loop.cancel, key))

    def release(self, key: RequestKey) -> None:
        """Release the blocks of a prefill sequence after a peer has read them; they stay cached."""
        self._commands.post(partial(self._loop.cancel, key))

    def unpin(self, blocks: Iterable[int]) -> None:
        """Release full blocks that were copied or declined."""
        self._commands.post(partial(self._loop.unpin, tuple(blocks)))

    def unquarantine(self, blocks: Iterable[int]) -> None:
        """Return suspect blocks to the pool: no transfer writes them any more."""
        self._commands.post(partial(self._loop.unquarantine, tuple(blocks)))

    def _run(self) -> None:
        set_thread_niceness(self._config.niceness)
        error: WeftError = Cancelled("the engine stops")
        try:
            is_idle = True
            while not self._commands.is_closed:
                items = self._commands.take(None if is_idle else 0)
                self.watchdog.start_step()
                is_idle = self._loop.run_step(items)
                self.watchdog.end_step(has_computed=not is_idle)
                self._commands.set_num_waiting(self._loop.num_waiting)
            self._loop.drain()
        except Exception as cause:
            logger.exception("engine step failed, failing all live sequences")
            error = EngineFailed(f"the engine's step failed: {cause!r}")
        self._fail_all(error)

    def _fail_all(self, error: WeftError) -> None:
        """Fail all live sequences, without touching scheduler and pool: their state may be what broke."""
        self._commands.close()
        entering = [item.spec.key for item in self._commands.take(0) if isinstance(item, Sequence)]
        failures = [SequenceFailed(key, error) for key in [*self._loop.keys, *entering]]
        if failures:
            self._listener(StepOutput(self._loop.load, failures=failures))


def validate_spec(spec: SequenceSpec, config: EngineConfig) -> None:
    """Raise InvalidRequest for a sequence that can never run here or would break a step for others."""
    num_tokens = len(spec.token_ids)
    if not num_tokens:
        raise InvalidRequest("the prompt is empty", "prompt")
    if not (min(spec.token_ids) >= 0 and max(spec.token_ids) < config.vocab_size):
        raise InvalidRequest(f"token ids must be between 0 and {config.vocab_size - 1}", "prompt")
    if any(not 0 <= token < config.vocab_size for token in spec.speculation.prediction):
        raise InvalidRequest(f"token ids must be between 0 and {config.vocab_size - 1}", "prediction")
    if num_tokens + 1 > config.context_tokens:
        raise InvalidRequest(
            f"the prompt has {num_tokens} tokens, and the context has room for {config.context_tokens - 1}",
            "prompt",
            "context_length_exceeded",
        )
    _check_sampling(spec.sampling, config.vocab_size)
    if not 0 <= spec.resumed_tokens < num_tokens:
        raise InvalidRequest("more tokens are resumed than there are", "resumed_tokens")
    if abs(spec.priority) > MAX_PRIORITY:
        raise InvalidRequest(f"the priority must be between -{MAX_PRIORITY} and {MAX_PRIORITY}", "priority")
    if spec.observer is not None and spec.wait_for_kv:
        raise InvalidRequest("hidden states are those of a prompt that is computed here, and whole", "observer")
    if spec.mode is SequenceMode.GENERATE and spec.sampling.max_tokens <= spec.resumed_tokens:
        raise InvalidRequest("max_tokens leaves nothing to generate", "max_tokens")


def _check_sampling(sampling: SamplingParams, vocab_size: int) -> None:
    if sampling.num_logprobs is not None and sampling.num_logprobs < 0:
        raise InvalidRequest("the number of logprobs must not be negative", "logprobs")
    if any(not 0 <= token < vocab_size for token, _ in sampling.logit_bias):
        raise InvalidRequest(f"token ids must be between 0 and {vocab_size - 1}", "logit_bias")
    if sampling.min_tokens and any(token >= vocab_size for token in sampling.stop_token_ids):
        raise InvalidRequest(f"token ids must be between 0 and {vocab_size - 1}", "stop_token_ids")
    if not sampling.repetition_penalty > 0:
        raise InvalidRequest("the repetition penalty must be above 0", "repetition_penalty")


# A step takes as long as the model needs on this machine, so the limit follows the slowest step so far.
MIN_HANG_SECONDS = 20.0
HANG_STEPS = 4.0
# The first step may compile kernels, capture graphs and fault in pages.
FIRST_HANG_SECONDS = 180.0


class StepWatchdog:
    """Detects a hung engine by the age of its step. Between two steps the thread waits for work and is healthy.

    The engine's thread writes, other threads read.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._started_at: float | None = None
        self._slowest_step: float | None = None

    def start_step(self) -> None:
        """Record that a step begins now."""
        self._started_at = self._clock()

    def end_step(self, has_computed: bool) -> None:
        """Record the end. An iteration that computed nothing does not count for the limit."""
        seconds, self._started_at = self.step_age, None
        if has_computed:
            self._slowest_step = max(self._slowest_step or 0.0, seconds)

    @property
    def step_age(self) -> float:
        """Seconds since the step in progress began; 0 between steps."""
        began = self._started_at
        return 0.0 if began is None else self._clock() - began

    @property
    def hang_timeout(self) -> float:
        """Seconds after which a step counts as hung."""
        slowest = self._slowest_step
        return FIRST_HANG_SECONDS if slowest is None else max(MIN_HANG_SECONDS, HANG_STEPS * slowest)

    @property
    def is_hung(self) -> bool:
        """True if the step in progress exceeds `hang_timeout`."""
        return self.step_age > self.hang_timeout
