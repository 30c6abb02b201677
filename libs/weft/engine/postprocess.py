"""Applies a step's results: appends tokens, ends sequences, publishes full blocks. No torch, no threads."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Items

from weft.engine.config import EngineConfig
from weft.engine.messages import SequenceFailed, StepOutput, TokenDelta
from weft.engine.sequence import Sequence, SequenceState
from weft.engine.step_scheduler import SampledToken, ScheduledChunk, StepScheduler, report_progress
from weft.errors import WeftError
from weft.kv.block_keys import tenant_tag
from weft.kv.block_pool import BlockPool
from weft.kv.layer_groups import page_key
from weft.kv.offload_queue import FullBlock, OffloadQueue
from weft.request import FinishReason, PositionLogprobs


class Postprocessor:
    """Updates sequences and the block pool after each step. Token counts are totals since the start."""

    def __init__(self, config: EngineConfig, pool: BlockPool, scheduler: StepScheduler) -> None:
        self.num_generated_tokens = 0
        self.num_computed_prompt_tokens = 0
        self._config = config
        self._pool = pool
        self._scheduler = scheduler
        self._offers = OffloadQueue(pool, config.max_pinned if config.pin_sealed else 0)

    def apply(
        self,
        chunks: Items[ScheduledChunk],
        results: Items[Items[SampledToken]],
        seconds: float,
        events: StepOutput,
    ) -> None:
        """Apply a finished step. `results` holds the tokens of each chunk, one for each of its sampled positions."""
        for chunk, tokens in zip(chunks, results, strict=True):
            sequence = chunk.sequence
            if not self._scheduler.on_step_done(chunk):
                continue
            if not sequence.has_emitted:
                sequence.compute_seconds += seconds
                self.num_computed_prompt_tokens += chunk.num_tokens
            self.seal(sequence, events)
            self._scheduler.block_tables.release_out_of_window(sequence)
            report_progress(sequence, events)
            if tokens:
                self.accept(sequence, tokens, events)

    def accept(self, sequence: Sequence, tokens: Items[SampledToken], events: StepOutput) -> None:
        """Append the next tokens of a sequence, in order. Tokens after one that ends it are dropped."""
        prompt = None if sequence.has_emitted else sequence.prompt_counts()
        ids: list[int] = []
        logprobs: list[PositionLogprobs] = []
        reason: FinishReason | None = None
        failure: WeftError | None = None
        for token in tokens:
            if (failure := token.failure) is not None:
                break
            reason = None if sequence.is_prefill else self.end_with(sequence, token.token_id)
            sequence.token_ids.append(token.token_id)
            ids.append(token.token_id)
            if token.logprobs:
                logprobs.append(token.logprobs)
            if reason is not None:
                break
        if ids:
            if sequence.is_prefill:
                self._scheduler.hold(sequence)  # the worker that decodes counts this token
            else:
                self.num_generated_tokens += len(ids)
            events.deltas.append(TokenDelta(sequence.spec.key, tuple(ids), tuple(logprobs), prompt, reason))
        if failure is not None:
            events.failures.append(SequenceFailed(sequence.spec.key, failure))
        if failure is not None or reason is not None:
            self._scheduler.remove(sequence)

    def end_with(self, sequence: Sequence, token_id: int) -> FinishReason | None:
        """Return why the sequence ends with that token next; None if it continues."""
        return sequence.end_with(token_id, self._config.eos_token_ids, self._config.context_tokens)

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
                    sealed = FullBlock(page_key(key, group), block, tenant, sequence.spec.retention)
                    self._publish(sealed, is_visible, events)

    def _publish(self, sealed: FullBlock, is_visible: bool, events: StepOutput) -> None:
        """Publish a block. Offer a copy only if a sequence that continues this prompt can see the block."""
        if self._pool.publish(sealed.block, sealed.block_key) and is_visible:
            events.sealed.extend(self._offers.add(sealed))

    def unpin(self, blocks: Iterable[int], events: StepOutput) -> None:
        """Release sealed blocks that were copied or declined, and offer others. Unknown blocks are ignored."""
        events.sealed.extend(self._offers.on_copied(blocks))
