"""A device that is as late as it may be: a step is packed when it is launched, and computed when it is waited for.

On a CPU `ModelRunner` has computed a step before the next one is planned, so that whatever is freed too early is freed
too late to be noticed. Here all of that happens in between. What the host gave along is kept as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from collections.abc import Sequence as Items
from copy import copy
from dataclasses import dataclass, replace

import torch

from weft.engine.logits_processor import token_history_of
from weft.engine.runner import ModelRunner
from weft.engine.step_scheduler import SampledToken, ScheduledChunk


@dataclass(frozen=True, slots=True)
class LateStep:
    """Nothing of it has happened yet."""

    collect: Callable[[], list[SampledToken]]


class LateRunner(ModelRunner):
    """`ModelRunner` in two halves. Steps are waited for one after the other, in the order of their launches.

    `free`: the pages that nobody holds, where given: no step under way may write there.
    """

    free: Collection[int] = ()

    def launch(self, chunks: Items[ScheduledChunk]) -> LateStep:  # type: ignore[override]
        """The host's half."""
        assert not any(chunk.has_observer for chunk in chunks)
        packed, kept = self._packer.build(chunks), [as_it_is(chunk) for chunk in chunks]
        sampling = [chunk for chunk in kept if chunk.has_sample]
        # the next step asks for them before this one has sampled
        self._sampler._rows = {chunk.sequence: row for row, chunk in enumerate(w for w in chunks if w.has_sample)}

        @torch.inference_mode()
        def compute() -> list[SampledToken]:
            written = set((packed.rows[2:] // self._block_tokens).flat)
            assert written.isdisjoint(self.free), (
                f"{[chunk.sequence.spec.key for chunk in chunks]}: pages that were given back"
            )
            self._clear_new_tails(kept)
            logits, rows_of_the_next = self._forward(packed, kept), self._sampler._rows
            tokens = self._sampler.launch(sampling, range(len(sampling)), logits).collect()
            self._sampler._rows = rows_of_the_next
            return tokens

        return LateStep(compute)


def as_it_is(chunk: ScheduledChunk) -> ScheduledChunk:
    """With its sequence's pages and tokens of this moment; what has been said of a text grows only as it is asked."""
    sequence = copy(chunk.sequence)
    sequence.history = token_history_of(chunk.sequence)
    sequence.page_ranges, sequence.token_ids = list(sequence.page_ranges), list(sequence.token_ids)
    return replace(chunk, sequence=sequence)
