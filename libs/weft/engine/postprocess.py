"""What follows a step: tokens appended, ends noticed, full blocks sealed. Pure bookkeeping.

Knows sequences, block numbers and events; knows neither tensors nor threads.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Items

from weft.engine.config import EngineConfig
from weft.engine.messages import SequenceFailed, StepOutput, TokenDelta
from weft.engine.sequence import Sequence, SequenceState
from weft.engine.step_scheduler import SampledToken, ScheduledChunk, StepScheduler, report_progress
from weft.kv.block_keys import tenant_tag
from weft.kv.block_pool import BlockPool
from weft.kv.layer_groups import page_key
from weft.kv.offload_queue import FullBlock, OffloadQueue
from weft.request import FinishReason


class Postprocessor:
    """Takes a step's results into the books. Token counts are totals since the start."""

    def __init__(self, config: EngineConfig, pool: BlockPool, planner: StepScheduler) -> None:
        self.num_generated_tokens = 0
        self.num_computed_prompt_tokens = 0
        self._config = config
        self._pool = pool
        self._scheduler = planner
        self._offers = OffloadQueue(pool, config.max_pinned if config.pin_sealed else 0)

    def apply(
        self, chunks: Items[ScheduledChunk], sampled: Items[SampledToken], seconds: float, events: StepOutput
    ) -> None:
        """`sampled` holds one token for each of `works` that samples, in their order."""
        tokens = iter(sampled)
        for chunk in chunks:
            sequence = chunk.sequence
            token = next(tokens) if chunk.has_sample else None
            if not self._scheduler.on_step_done(chunk):
                continue
            if not sequence.has_emitted:
                sequence.compute_seconds += seconds
                self.num_computed_prompt_tokens += chunk.num_tokens
            self.seal(sequence, events)
            self._scheduler.block_tables.release_out_of_window(sequence)
            report_progress(sequence, events)
            if token is not None:
                self.accept(sequence, token, events)

    def accept(self, sequence: Sequence, token: SampledToken, events: StepOutput) -> None:
        """The next token of a sequence, and the sequence's end if it is the last."""
        if token.failure is not None:
            events.failures.append(SequenceFailed(sequence.spec.key, token.failure))
            self._scheduler.remove(sequence)
            return
        prompt = None if sequence.has_emitted else sequence.prompt_counts()
        reason = None if sequence.is_prefill else self.end_with(sequence, token.token_id)
        sequence.token_ids.append(token.token_id)
        if sequence.is_prefill:
            self._scheduler.hold(sequence)  # its token counts where the sequence goes on
        else:
            self.num_generated_tokens += 1
        logprobs = (token.logprobs,) if token.logprobs else ()
        key, ids = sequence.spec.key, (token.token_id,)
        events.deltas.append(TokenDelta(key, ids, logprobs, prompt, reason))
        if reason is not None:
            self._scheduler.remove(sequence)

    def end_with(self, sequence: Sequence, token_id: int) -> FinishReason | None:
        """Why the sequence ends when that token comes next; None when it goes on."""
        return sequence.end_with(token_id, self._config.eos_token_ids, self._config.context_tokens)

    def seal(self, sequence: Sequence, events: StepOutput) -> None:
        """Publish the blocks whose KV has become complete; report them where somebody copies them."""
        assert sequence.state is SequenceState.RUNNING
        size = self._config.block_tokens
        while sequence.num_sealed < sequence.num_computed // size:
            index, key = sequence.num_sealed, sequence.key(sequence.num_sealed, size)
            sequence.num_sealed += 1
            tenant = tenant_tag(sequence.spec.cache_salt)
            for group, run in enumerate(sequence.page_ranges):
                block = run.page(index)
                if block is not None:
                    is_wanted = index >= self._config.paging.first(group, sequence.num_reusable(size))
                    sealed = FullBlock(page_key(key, group), block, tenant, sequence.spec.retention)
                    self._publish(sealed, is_wanted, events)

    def _publish(self, sealed: FullBlock, is_wanted: bool, events: StepOutput) -> None:
        """`is_wanted`: not out of sight for whoever goes on from this prompt, and so worth a copy elsewhere."""
        if self._pool.publish(sealed.block, sealed.block_key) and is_wanted:
            events.sealed.extend(self._offers.add(sealed))

    def unpin(self, blocks: Iterable[int], events: StepOutput) -> None:
        """Sealed blocks were copied or declined; unknown ones are left alone. Others are reported in their place."""
        events.sealed.extend(self._offers.on_copied(blocks))
