"""The engine's thread: what anyone may ask of it, from any thread, and how it lives and dies.

Knows threads and who may enter. What happens in a turn is the loop's matter.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial

from weft.engine.admission import check
from weft.engine.config import EngineConfig
from weft.engine.inbox import Inbox
from weft.engine.loop import Loop, Runner
from weft.engine.manners import give_way
from weft.engine.messages import EngineLoad, FirstToken, PoolMemory, SequenceFailed, SequenceSpec, StepOutput
from weft.engine.pulse import Pulse
from weft.engine.sequence import Sequence
from weft.errors import Cancelled, EngineFailed, WeftError
from weft.kv.layer_groups import Paging
from weft.request import RequestKey

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
        self._loop = Loop(runner, config, listener, clock)
        self._inbox = Inbox(config.max_waiting)
        self.pulse = Pulse(clock)
        self._thread = threading.Thread(target=self._run, name="weft-engine", daemon=True)

    def start(self) -> None:
        """Start the thread. Once."""
        self._thread.start()

    def stop(self) -> None:
        """End after the current step and wait for that; sequences still alive fail with Cancelled.

        A step that will not end is not waited for: its thread dies with the process.
        """
        self._inbox.close()
        if self._thread.ident is None:
            return
        while self._thread.is_alive() and not self.pulse.has_stopped:
            self._thread.join(STOP_PERIOD_SECONDS)

    @property
    def is_alive(self) -> bool:
        """The thread takes work: not before `start`, not after `stop` or a crash."""
        return self._thread.is_alive() and not self._inbox.is_closed

    @property
    def pool_memory(self) -> PoolMemory:
        """Where the block pool lies in this process."""
        return self._runner.pool_memory

    @property
    def paging(self) -> Paging:
        """How the pages of sequences lie."""
        return self._config.paging

    @property
    def load(self) -> EngineLoad:
        """The load as of the last StepOutput."""
        return self._loop.load

    def submit(self, spec: SequenceSpec) -> None:
        """Run a sequence. Raises InvalidRequest, Overloaded or EngineFailed; then nothing was begun."""
        check(spec, self._config)
        self._inbox.enter(Sequence(spec, list(spec.token_ids), self._clock()))

    def foretell(self, key: RequestKey, first: FirstToken) -> None:
        """The first token of a reserved sequence whose KV is still on its way: it is told at once.

        It stands, whatever becomes of the KV. One that ends the sequence is not told before `filled`: until then its
        blocks are being written.
        """
        self._inbox.post(partial(self._loop.foretell, key, first))

    def filled(
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
        self._inbox.post(partial(self._loop.fill, key, num_ready_tokens, first, tuple(suspect_blocks)))

    def cancel(self, key: RequestKey) -> None:
        """End a sequence in whatever state; nothing more is said about it."""
        self._inbox.post(partial(self._loop.cancel, key))

    def release(self, key: RequestKey) -> None:
        """A prefill sequence's blocks have been read; they become cache."""
        self._inbox.post(partial(self._loop.cancel, key))

    def unpin(self, blocks: Iterable[int]) -> None:
        """Blocks of SealedBlocks were copied or declined."""
        self._inbox.post(partial(self._loop.unpin, tuple(blocks)))

    def unquarantine(self, blocks: Iterable[int]) -> None:
        """No transfer touches these suspect blocks any more."""
        self._inbox.post(partial(self._loop.unquarantine, tuple(blocks)))

    def _run(self) -> None:
        give_way(self._config.niceness)
        error: WeftError = Cancelled("the engine stops")
        try:
            is_idle = True
            while not self._inbox.is_closed:
                items = self._inbox.take(None if is_idle else 0)
                self.pulse.begin()
                is_idle = self._loop.turn(items)
                self.pulse.end(has_computed=not is_idle)
                self._inbox.count_waiting(self._loop.num_waiting)
            self._loop.finish()
        except Exception as cause:
            logger.exception("the engine's step failed; every live sequence fails with it")
            error = EngineFailed(f"the engine's step failed: {cause!r}")
        self._end(error)

    def _end(self, error: WeftError) -> None:
        """Fail all that lives; the books are not touched, they may be what broke."""
        self._inbox.close()
        entering = [item.spec.key for item in self._inbox.take(0) if isinstance(item, Sequence)]
        failures = [SequenceFailed(key, error) for key in [*self._loop.keys, *entering]]
        if failures:
            self._listener(StepOutput(self._loop.load, failures=failures))
