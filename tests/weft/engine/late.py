"""A device that is as late as possible: a step is built when it is launched, and computed when its results are awaited.

On a CPU `ModelRunner` has computed a step before the next one is scheduled, so pages that are freed too early go
unnoticed. Here everything that the host does between two steps happens before the first one is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from collections.abc import Sequence as Items
from copy import copy
from dataclasses import dataclass, replace

from weft.engine.runner import ModelRunner
from weft.engine.step_scheduler import SampledToken, ScheduledChunk


@dataclass(frozen=True, slots=True)
class LateStep:
    """A step that is computed by `collect`."""

    collect: Callable[[], list[tuple[SampledToken, ...]]]
    work_seconds: float | None = None


class LateRunner(ModelRunner):
    """`ModelRunner` in two halves. Steps are awaited one after the other, in the order of their launches.

    `free`: the pages that no sequence holds, if set: no step in flight may write there.
    """

    free: Collection[int] = ()

    def launch(self, chunks: Items[ScheduledChunk]) -> LateStep:  # type: ignore[override]
        """Do the host's half."""
        assert not any(chunk.has_observer for chunk in chunks)
        step, kept = self._build(chunks), [snapshot(chunk) for chunk in chunks]
        ends = [sum(chunk.num_samples for chunk in chunks[: i + 1]) for i in range(len(chunks))]
        spans = [(end - chunk.num_samples, end) for chunk, end in zip(chunks, ends, strict=True)]

        def compute() -> list[tuple[SampledToken, ...]]:
            written = set((step.rows[2:] // self.executor.pool.block_tokens).flat)
            assert written.isdisjoint(self.free), (
                f"{[chunk.sequence.spec.key for chunk in chunks]}: writes to pages that were released"
            )
            return self._execute(kept, step, spans).collect()

        return LateStep(compute)


def snapshot(chunk: ScheduledChunk) -> ScheduledChunk:
    """Copy a chunk with its sequence's pages and tokens of this moment. The token history is shared."""
    sequence = copy(chunk.sequence)
    sequence.history = chunk.sequence.token_history()
    sequence.page_ranges, sequence.token_ids = list(sequence.page_ranges), list(sequence.token_ids)
    return replace(chunk, sequence=sequence)
