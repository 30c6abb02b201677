"""The engine's thread: what anyone may ask of it, from any thread, and how it lives and dies.

Knows threads and who may enter. What happens in a turn is the loop's matter.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial

from weft.engine.command_queue import CommandQueue
from weft.engine.config import EngineConfig
from weft.engine.loop import EngineLoop, Runner
from weft.engine.messages import (
    EngineLoad,
    FirstToken,
    PoolMemory,
    SequenceFailed,
    SequenceMode,
    SequenceSpec,
    StepOutput,
)
from weft.engine.niceness import set_thread_niceness
from weft.engine.sequence import Sequence
from weft.engine.wait_queue import MAX_PRIORITY
from weft.engine.watchdog import StepWatchdog
from weft.errors import Cancelled, EngineFailed, InvalidRequest, WeftError
from weft.kv.layer_groups import PagingPolicy
from weft.request import RequestKey, SamplingParams

logger = logging.getLogger(__name__)
STOP_PERIOD_SECONDS = 0.5


class Engine:
    """Public methods may be called from any thread and return at once; only `stop` waits, for the step under way.

    `listener` is called on the engine's thread and must not block. Commands about unknown keys change nothing.
    """

    def __init__(
        self,
        runner: Runner,
        config: EngineConfig,
        listener: Callable[[StepOutput], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._runner = runner
        self._config = config
        self._listener = listener
        self._clock = clock
        self._loop = EngineLoop(runner, config, listener, clock)
        self._commands = CommandQueue(config.max_waiting)
        self.watchdog = StepWatchdog(clock)
        self._thread = threading.Thread(target=self._run, name="weft-engine", daemon=True)

    def start(self) -> None:
        """Start the thread. Once."""
        self._thread.start()

    def stop(self) -> None:
        """End after the current step and wait for that; sequences still alive fail with Cancelled.

        A step that will not end is not waited for: its thread dies with the process.
        """
        self._commands.close()
        if self._thread.ident is None:
            return
        while self._thread.is_alive() and not self.watchdog.is_hung:
            self._thread.join(STOP_PERIOD_SECONDS)

    @property
    def is_alive(self) -> bool:
        """The thread takes work: not before `start`, not after `stop` or a crash."""
        return self._thread.is_alive() and not self._commands.is_closed

    @property
    def pool_memory(self) -> PoolMemory:
        """Where the block pool lies in this process."""
        return self._runner.pool_memory

    @property
    def paging(self) -> PagingPolicy:
        """How the pages of sequences lie."""
        return self._config.paging

    @property
    def load(self) -> EngineLoad:
        """The load as of the last StepOutput."""
        return self._loop.load

    def submit(self, spec: SequenceSpec) -> None:
        """Run a sequence. Raises InvalidRequest, Overloaded or EngineFailed; then nothing was begun."""
        validate_spec(spec, self._config)
        self._commands.submit(Sequence(spec, list(spec.token_ids), self._clock()))

    def set_first_token(self, key: RequestKey, first: FirstToken) -> None:
        """The first token of a reserved sequence whose KV is still on its way: it is told at once.

        It stands, whatever becomes of the KV. One that ends the sequence is not told before `filled`: until then its
        blocks are being written.
        """
        self._commands.post(partial(self._loop.set_first_token, key, first))

    def complete_kv(
        self,
        key: RequestKey,
        num_ready_tokens: int,
        first: FirstToken | None = None,
        suspect_blocks: Iterable[int] = (),
    ) -> None:
        """A reserved sequence's first `num_ready_tokens` prompt tokens have their KV; the rest is computed here.

        With the whole prompt ready and its `first` token it goes straight on to generate. `suspect_blocks` may still
        be written by a transfer: they are swapped for others and untouchable until `unquarantine`. To give up a
        sequence whose transfers may be under way, call this with 0 tokens and the blocks in question, then `cancel`.
        """
        self._commands.post(partial(self._loop.complete_kv, key, num_ready_tokens, first, tuple(suspect_blocks)))

    def cancel(self, key: RequestKey) -> None:
        """End a sequence in whatever state; nothing more is said about it."""
        self._commands.post(partial(self._loop.cancel, key))

    def release(self, key: RequestKey) -> None:
        """A prefill sequence's blocks have been read; they become cache."""
        self._commands.post(partial(self._loop.cancel, key))

    def unpin(self, blocks: Iterable[int]) -> None:
        """Blocks of SealedBlocks were copied or declined."""
        self._commands.post(partial(self._loop.unpin, tuple(blocks)))

    def unquarantine(self, blocks: Iterable[int]) -> None:
        """No transfer touches these suspect blocks any more."""
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
            logger.exception("the engine's step failed; every live sequence fails with it")
            error = EngineFailed(f"the engine's step failed: {cause!r}")
        self._fail_all(error)

    def _fail_all(self, error: WeftError) -> None:
        """Fail all that lives; the books are not touched, they may be what broke."""
        self._commands.close()
        entering = [item.spec.key for item in self._commands.take(0) if isinstance(item, Sequence)]
        failures = [SequenceFailed(key, error) for key in [*self._loop.keys, *entering]]
        if failures:
            self._listener(StepOutput(self._loop.load, failures=failures))


def validate_spec(spec: SequenceSpec, config: EngineConfig) -> None:
    """Raise InvalidRequest for what could never run here, or would take the others down with it."""
    num_tokens = len(spec.token_ids)
    if not num_tokens:
        raise InvalidRequest("the prompt is empty", "prompt")
    if not (min(spec.token_ids) >= 0 and max(spec.token_ids) < config.vocab_size):
        raise InvalidRequest(f"token ids must be between 0 and {config.vocab_size - 1}", "prompt")
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
