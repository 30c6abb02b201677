"""One iteration of the engine: run commands, schedule -> launch -> postprocess one step, emit one StepOutput.

With `steps_ahead` 0 an iteration finishes the step that it launched. With 1 it launches a step and then finishes the
one before: while the device computes one step, the host postprocesses the previous one and schedules the next.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from weft.engine.config import EngineConfig
from weft.engine.drafting.drafter import DecodeStep, DraftOutcome, DraftSource, Proposal, Speculator
from weft.engine.messages import EngineLoad, FirstToken, PoolMemory, SequenceFailed, StepOutput, TokenDelta
from weft.engine.sequence import Sequence, SequenceState
from weft.engine.step_scheduler import SampledToken, ScheduledChunk, StepScheduler, report_progress
from weft.errors import EngineFailed, Overloaded, WeftError
from weft.kv.block_pool import BlockPool, FullBlock, OffloadQueue, PageVariant, page_key, tenant_tag
from weft.request import NO_DRAFTS, DraftCounts, FinishReason, PositionLogprobs, RequestKey

Command = Callable[[], None]


class CommandQueue:
    """Bounded: `max_waiting` limits the sequences, and each sequence has only a few commands."""

    def __init__(self, max_waiting: int) -> None:
        self._max_waiting = max_waiting
        self._changed = threading.Condition()
        self._items: deque[Sequence | Command] = deque()
        self._num_submitted = 0
        self._num_waiting = 0
        self._is_closed = False

    @property
    def is_closed(self) -> bool:
        """True after `close`: the queue accepts nothing more."""
        return self._is_closed

    def submit(self, sequence: Sequence) -> None:
        """Add a new sequence. Raises Overloaded if too many wait, EngineFailed after `close`."""
        with self._changed:
            if self._is_closed:
                raise EngineFailed("the engine has ended")
            if self._num_waiting + self._num_submitted >= self._max_waiting:
                raise Overloaded(f"{self._num_waiting + self._num_submitted} sequences are waiting already")
            self._num_submitted += 1
            self._items.append(sequence)
            self._changed.notify()

    def post(self, command: Command) -> None:
        """Add a command. After `close` it is dropped, because no sequence is left."""
        with self._changed:
            if not self._is_closed:
                self._items.append(command)
                self._changed.notify()

    def take(self, timeout: float | None) -> list[Sequence | Command]:
        """Return all items in order. If there are none, wait for one or for `close`, up to `timeout` seconds."""
        with self._changed:
            if not self._items and not self._is_closed:
                self._changed.wait(timeout)
            items = list(self._items)
            self._items.clear()
            # Counted here until the engine's thread reports its own count.
            self._num_waiting += self._num_submitted
            self._num_submitted = 0
            return items

    def set_num_waiting(self, num_waiting: int) -> None:
        """Set how many of the taken sequences wait for admission. Called by the engine's thread."""
        with self._changed:
            self._num_waiting = num_waiting

    def close(self) -> None:
        """Accept nothing more and wake the engine's thread."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()


class KeptTokens(NamedTuple):
    """Tokens that a sequence gains in a step, and why it ends with them, if it does.

    `num_drafts`: leading tokens that were drafts. `num_rows`: rows of the step that count.
    """

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[PositionLogprobs, ...] = ()
    reason: FinishReason | None = None
    failure: WeftError | None = None
    num_drafts: int = 0

    @property
    def num_rows(self) -> int:
        """A failed row yields no token, but it counts."""
        return len(self.token_ids) + (self.failure is not None)

    @property
    def computed(self) -> tuple[int, ...]:
        """The tokens that have KV from the same step: accepted drafts that are not the last token."""
        return self.token_ids[:-1] if self.failure is None else self.token_ids

    def draft_counts(self, drafts: Proposal) -> DraftCounts:
        """Return the counts of a step with these drafts."""
        predicted = [draft.source is DraftSource.PREDICTION for draft in drafts]
        return DraftCounts(len(drafts), self.num_drafts, sum(predicted), sum(predicted[: self.num_drafts]))


class Postprocessor:
    """Updates sequences and the block pool after each step. Token counts are totals since the start."""

    def __init__(
        self, config: EngineConfig, pool: BlockPool, scheduler: StepScheduler, speculator: Speculator | None = None
    ) -> None:
        self.num_generated_tokens = 0
        self.num_computed_prompt_tokens = 0
        self._config = config
        self._pool = pool
        self._scheduler = scheduler
        self._speculator = speculator
        self._offers = OffloadQueue(pool, config.max_pinned if config.pin_sealed else 0)

    def apply(
        self,
        chunks: Items[ScheduledChunk],
        results: Items[Items[SampledToken]],
        seconds: float,
        events: StepOutput,
        work_seconds: float | None = None,
    ) -> None:
        """Apply a finished step.

        - `results`: tokens of each chunk, one for each of its sampled positions.
        - `seconds`: duration of the step. `work_seconds`: see `StepHandle`.
        """
        kept = [self._finish(chunk, each, seconds, events) for chunk, each in zip(chunks, results, strict=True)]
        if self._speculator is not None:
            self._learn(self._speculator, chunks, kept, seconds if work_seconds is None else work_seconds)

    def _learn(
        self, speculator: Speculator, chunks: Items[ScheduledChunk], kept: Items[KeptTokens | None], seconds: float
    ) -> None:
        decoding = [chunk for chunk in chunks if chunk.is_decode]
        if not decoding:
            return
        num_rows = sum(chunk.num_tokens for chunk in decoding)
        step = DecodeStep(
            outcomes=[_outcome(*each) for each in zip(chunks, kept, strict=True) if each[0].is_decode],
            num_rows=num_rows,
            num_prompt_rows=sum(chunk.num_tokens for chunk in chunks) - num_rows,
            context_tokens=sum(chunk.start + row for chunk in decoding for row in range(1, chunk.num_tokens + 1)),
            seconds=seconds,
        )
        speculator.on_step(step)

    def _finish(
        self, chunk: ScheduledChunk, tokens: Items[SampledToken], seconds: float, events: StepOutput
    ) -> KeptTokens | None:
        """Apply a finished chunk. Returns None if its sequence has ended meanwhile."""
        sequence = chunk.sequence
        kept = self._keep(sequence, tokens, chunk.draft_ids) if chunk.drafts else self._keep_first(sequence, tokens)
        if not self._scheduler.on_step_done(chunk, kept.num_rows if chunk.drafts else chunk.num_tokens):
            return None
        if not sequence.has_emitted:
            sequence.compute_seconds += seconds
            self.num_computed_prompt_tokens += chunk.num_tokens
        if chunk.drafts:
            sequence.token_ids += kept.computed
        self.seal(sequence, events)
        self._scheduler.block_tables.release_out_of_window(sequence)
        report_progress(sequence, events)
        if tokens:
            self._append(sequence, kept, chunk.drafts, events)
        return kept

    def accept(self, sequence: Sequence, token: SampledToken, events: StepOutput) -> None:
        """Append the next token of a sequence that was sampled elsewhere."""
        self._append(sequence, self._keep_first(sequence, (token,)), (), events)

    def _keep_first(self, sequence: Sequence, tokens: Items[SampledToken]) -> KeptTokens:
        """Keep the token of a chunk without drafts, if it sampled one: `_keep` in a third of its time."""
        if not tokens:
            return KeptTokens()
        token = tokens[0]
        if token.failure is not None:
            return KeptTokens(failure=token.failure)
        reason = None if sequence.is_prefill else self.end_with(sequence, token.token_id)
        return KeptTokens((token.token_id,), (token.logprobs,) if token.logprobs else (), reason)

    def _keep(self, sequence: Sequence, tokens: Items[SampledToken], drafts: list[int]) -> KeptTokens:
        """Choose the tokens to keep: as long as the draft before each of them equals the token before it.

        Nothing follows a failed row or a token that ends the sequence.
        """
        ids: list[int] = []
        logprobs: list[PositionLogprobs] = []
        reason: FinishReason | None = None
        failure: WeftError | None = None
        num_drafts = 0
        for place, token in enumerate(tokens):
            if (failure := token.failure) is not None:
                break
            reason = None if sequence.is_prefill else self.end_with(sequence, token.token_id, place)
            ids.append(token.token_id)
            if token.logprobs:
                logprobs.append(token.logprobs)
            is_draft = place < len(drafts) and drafts[place] == token.token_id
            num_drafts += is_draft
            if reason is not None or not is_draft:
                break
        return KeptTokens(tuple(ids), tuple(logprobs), reason, failure, num_drafts)

    def _append(self, sequence: Sequence, kept: KeptTokens, drafts: Proposal, events: StepOutput) -> None:
        """Append the sampled token, emit all tokens, and end the sequence if they do."""
        prompt = None if sequence.has_emitted else sequence.prompt_counts()
        if kept.failure is None:
            sequence.token_ids.append(kept.token_ids[-1])
        if kept.token_ids:
            if sequence.is_prefill:
                self._scheduler.hold(sequence)  # the worker that decodes counts this token
            else:
                self.num_generated_tokens += len(kept.token_ids)
            counts = kept.draft_counts(drafts) if drafts else NO_DRAFTS
            events.deltas.append(
                TokenDelta(sequence.spec.key, kept.token_ids, kept.logprobs, prompt, kept.reason, counts)
            )
        if kept.failure is not None:
            events.failures.append(SequenceFailed(sequence.spec.key, kept.failure))
        if kept.failure is not None or kept.reason is not None:
            self._scheduler.remove(sequence)
        elif drafts:
            self._scheduler.block_tables.release_unused(sequence)

    def end_with(self, sequence: Sequence, token_id: int, num_ahead: int = 0) -> FinishReason | None:
        """Return why the sequence ends with that token after `num_ahead` others; None if it continues."""
        return sequence.end_with(token_id, self._config.eos_token_ids, self._config.context_tokens, num_ahead)

    def seal(self, sequence: Sequence, events: StepOutput) -> None:
        """Publish the blocks that have become complete, and report those that should be copied."""
        assert sequence.state is SequenceState.RUNNING
        size = self._config.block_tokens
        while sequence.num_sealed < sequence.num_computed // size:
            index, key = sequence.num_sealed, sequence.key(sequence.num_sealed, size)
            sequence.num_sealed += 1
            tenant = tenant_tag(sequence.spec.cache_salt)
            for group, run in enumerate(sequence.page_ranges):
                block = run.page(index)
                if block is not None:
                    is_visible = index >= self._config.paging.first(group, sequence.num_reusable(size))
                    is_bare = group == self._config.draft_group and index * size < sequence.num_bare
                    if is_bare and self._pool.is_known(page_key(key, group)):
                        continue
                    name = page_key(key, group, PageVariant.BARE if is_bare else PageVariant.PLAIN)
                    self._publish(FullBlock(name, block, tenant, sequence.spec.retention), is_visible, events)

    def _publish(self, sealed: FullBlock, is_visible: bool, events: StepOutput) -> None:
        """Publish a block. Offer a copy only if a sequence that continues this prompt can see the block."""
        if self._pool.publish(sealed.block, sealed.block_key) and is_visible:
            events.sealed.extend(self._offers.add(sealed))

    def unpin(self, blocks: Iterable[int], events: StepOutput) -> None:
        """Release sealed blocks that were copied or declined, and offer others. Unknown blocks are ignored."""
        events.sealed.extend(self._offers.on_copied(blocks))


def _outcome(chunk: ScheduledChunk, kept: KeptTokens | None) -> DraftOutcome:
    """Return what became of a chunk's drafts. A sequence that ended before has none."""
    if kept is None:
        return DraftOutcome(chunk.sequence, (), 0, 0)
    return DraftOutcome(chunk.sequence, chunk.drafts, kept.num_drafts, len(kept.token_ids))


logger = logging.getLogger(__name__)


class StepHandle(Protocol):
    """A launched step that may still run on the device."""

    @property
    def work_seconds(self) -> float | None:
        """CPU seconds of the engine's thread, if that thread computed the step; None if a device did.

        Speculation compares steps by them. They leave out the time in which another process had the core.
        """

    def collect(self) -> Items[Items[SampledToken]]:
        """Wait for the step; return each chunk's tokens, one for each of its sampled positions."""


class Runner(Protocol):
    """Owns the bytes of the block pool; computes and samples."""

    @property
    def pool_memory(self) -> PoolMemory:
        """Location of the block pool."""

    def launch(self, chunks: Items[ScheduledChunk]) -> StepHandle:
        """Begin to compute the KV of all chunks and their samples, after all steps launched before."""


@dataclass(frozen=True, slots=True)
class StepInFlight:
    chunks: Items[ScheduledChunk]
    handle: StepHandle
    launched_at: float


class EngineLoop:
    """Owns block pool, scheduler and postprocessor, and calls the runner. Not thread-safe."""

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
        self._pool = BlockPool(config.num_blocks)
        self._scheduler = StepScheduler(config, self._pool, speculator)
        self._postprocessor = Postprocessor(config, self._pool, self._scheduler, speculator)
        self._events = StepOutput()  # of the next output
        self._in_flight: deque[StepInFlight] = deque()
        self._finished_at = 0.0
        self.load = self._measure()

    def run_step(self, items: Items[Sequence | Command]) -> bool:
        """Apply `items`, launch a step if there is work, finish the step that is due. Returns True if idle.

        The listener is called for every finished step, for events, and when the load has changed.
        """
        for item in items:
            self._add(item) if isinstance(item, Sequence) else item()
        chunks = self._schedule()
        if chunks:
            if self._events.has_events:
                self._emit(0.0)  # peers can start transfers while the step computes
            began_at = self._clock()
            self._in_flight.append(StepInFlight(chunks, self._runner.launch(chunks), began_at))
        # The next step needs the tokens of one with drafts, and the pages that rejected drafts release.
        is_ahead = bool(chunks) and not any(chunk.drafts for chunk in chunks)
        is_due = len(self._in_flight) > (self._config.steps_ahead if is_ahead else 0)
        if is_due:
            self._finish_step()
        elif not chunks and (self._events.has_events or self._measure() != self.load):
            self._emit(0.0)
        self._scheduler.forget_ended()
        # A finished step may have freed blocks for a waiting sequence, so it does not count as idle.
        return not chunks and not is_due

    def drain(self) -> None:
        """Wait for the steps in flight and drop their results."""
        while self._in_flight:
            self._in_flight.popleft().handle.collect()

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for admission."""
        return len(self._scheduler.wait_queue)

    @property
    def keys(self) -> list[RequestKey]:
        """Keys of all live sequences."""
        return list(self._scheduler.live)

    def set_first_token(self, key: RequestKey, first: FirstToken) -> None:
        sequence = self._scheduler.live.get(key)
        if sequence is None or sequence.state is not SequenceState.RESERVED or sequence.has_emitted:
            return
        if self._postprocessor.end_with(sequence, first.token_id) is None:
            self._postprocessor.accept(sequence, SampledToken(first.token_id, first.logprobs), self._events)

    def complete_kv(
        self, key: RequestKey, num_ready: int, first: FirstToken | None, suspects: tuple[int, ...], num_bare: int = 0
    ) -> None:
        sequence = self._scheduler.live.get(key)
        if sequence is None or sequence.state is not SequenceState.RESERVED:
            return
        if sequence.is_prefill or (first is None and not sequence.has_emitted):
            num_ready = min(num_ready, sequence.num_prompt - 1)  # the last token must be computed, for its logits
        if not self._scheduler.complete_kv(sequence, num_ready, suspects, num_bare):
            return
        self._postprocessor.seal(sequence, self._events)
        report_progress(sequence, self._events)
        if first is not None and not sequence.num_pending:
            self._postprocessor.accept(sequence, SampledToken(first.token_id, first.logprobs), self._events)

    def cancel(self, key: RequestKey) -> None:
        sequence = self._scheduler.live.get(key)
        if sequence is not None:
            self._scheduler.remove(sequence)

    def unpin(self, blocks: Iterable[int]) -> None:
        self._postprocessor.unpin(blocks, self._events)

    def unquarantine(self, blocks: Iterable[int]) -> None:
        self._pool.unquarantine(blocks)

    def _add(self, sequence: Sequence) -> None:
        if sequence.spec.key in self._scheduler.live:
            logger.warning("duplicate sequence dropped key=%s", sequence.spec.key)
            return
        self._scheduler.add(sequence)

    def _schedule(self) -> list[ScheduledChunk]:
        chunks = self._scheduler.schedule(self._events, self._clock(), is_drained=not self._in_flight)
        while chunks is None:
            self._finish_step()
            chunks = self._scheduler.schedule(self._events, self._clock(), is_drained=not self._in_flight)
        return chunks

    def _finish_step(self) -> None:
        """Wait for the oldest step in flight and postprocess it."""
        step = self._in_flight.popleft()
        sampled = step.handle.collect()
        began_at, self._finished_at = max(step.launched_at, self._finished_at), self._clock()
        seconds = self._finished_at - began_at
        self._postprocessor.apply(step.chunks, sampled, seconds, self._events, step.handle.work_seconds)
        self._emit(seconds)

    def _emit(self, seconds: float) -> None:
        self.load = self._measure()
        events, self._events = self._events, StepOutput()
        changes = self._pool.take_changes()
        self._listener(replace(events, load=self.load, step_seconds=seconds, cache_changes=changes))

    def _measure(self) -> EngineLoad:
        scheduler, counts = self._scheduler, self._pool.counts()
        return EngineLoad(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.wait_queue) + scheduler.num_reserved,
            queued_prefill_tokens=scheduler.queued_prefill_tokens,
            active_tokens=scheduler.active_tokens,
            free_blocks=counts.free,
            cached_blocks=counts.cached,
            active_blocks=counts.active,
            quarantined_blocks=counts.quarantined,
            generated_tokens=self._postprocessor.num_generated_tokens,
            computed_prompt_tokens=self._postprocessor.num_computed_prompt_tokens,
        )
