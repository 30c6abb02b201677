"""Which sequences fill the draft layer: none but a sample while drafts of the draft model do not pay."""

from __future__ import annotations

from itertools import count

from weft.engine.sequence import Sequence

# Steps in a row in which the draft model must not pay before sequences stop to fill its layer: what they leave out is
# not filled later.
IDLE_STEPS = 64
# Of all stretches of this many tokens one in 16 fills the layer, so that its drafts show when they pay again.
STRETCH_TOKENS = 256
SAMPLE_STRETCHES = 16


class HeadUse:
    """Tracks whether an engine uses its draft model.

    The rows of the draft layer take time in every step. That is several percent where arithmetic is the bottleneck: in
    prompts and large batches.
    """

    def __init__(self) -> None:
        self._num_idle_steps = 0
        self._numbers = count()
        self._stretches: dict[Sequence, tuple[int, bool]] = {}  # which one it is, and whether it belongs to the sample

    @property
    def is_idle(self) -> bool:
        """True if only the sample fills the layer."""
        return self._num_idle_steps >= IDLE_STEPS

    def fills(self, sequence: Sequence) -> bool:
        """Return True if the sequence should fill the layer from its next step on."""
        index = len(sequence.token_ids) // STRETCH_TOKENS
        known = self._stretches.get(sequence)
        if known is None or known[0] != index:
            # The first stretches of an engine are not part of it: the layer is not idle yet.
            known = self._stretches[sequence] = index, next(self._numbers) % SAMPLE_STRETCHES == SAMPLE_STRETCHES - 1
        return known[1] or not self.is_idle

    def on_step(self, is_paying: bool) -> None:
        """Count a step; `is_paying`: drafts of the draft model were expected to save time."""
        self._num_idle_steps = 0 if is_paying else self._num_idle_steps + 1

    def forget(self, sequence: Sequence) -> None:
        """Drop a sequence that has ended."""
        self._stretches.pop(sequence, None)
