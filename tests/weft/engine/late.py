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

from weft.engine.batch import Sampled, Work
from weft.engine.runner import ModelRunner
from weft.engine.shaping import history_of


@dataclass(frozen=True, slots=True)
class LateStep:
    """Nothing of it has happened yet."""

    collect: Callable[[], list[Sampled]]


class LateRunner(ModelRunner):
    """`ModelRunner` in two halves. Steps are waited for one after the other, in the order of their launches.

    `free`: the pages that nobody holds, where given: no step under way may write there.
    """

    free: Collection[int] = ()

    def launch(self, works: Items[Work]) -> LateStep:  # type: ignore[override]
        """The host's half."""
        assert not any(work.is_read for work in works)
        packed, kept = self._packer.pack(works), [as_it_is(work) for work in works]
        sampling = [work for work in kept if work.samples]
        # the next step asks for them before this one has sampled
        self._sampler._rows = {work.sequence: row for row, work in enumerate(w for w in works if w.samples)}

        @torch.inference_mode()
        def compute() -> list[Sampled]:
            written = set((packed.rows[2:] // self._block_tokens).flat)
            assert written.isdisjoint(self.free), (
                f"{[work.sequence.spec.key for work in works]}: pages that were given back"
            )
            self._clear_new_tails(kept)
            logits, rows_of_the_next = self._forward(packed, kept), self._sampler._rows
            tokens = self._sampler.launch(sampling, range(len(sampling)), logits).collect()
            self._sampler._rows = rows_of_the_next
            return tokens

        return LateStep(compute)


def as_it_is(work: Work) -> Work:
    """With its sequence's pages and tokens of this moment; what has been said of a text grows only as it is asked."""
    sequence = copy(work.sequence)
    sequence.history = history_of(work.sequence)
    sequence.runs, sequence.token_ids = list(sequence.runs), list(sequence.token_ids)
    return replace(work, sequence=sequence)
