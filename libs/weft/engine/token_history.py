"""What a sequence's next token depends on beside the model: tokens seen so far, and a grammar's state. No torch.

A function of the sequence's tokens alone: built again elsewhere from prompt and generated tokens, it is the same.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Items
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class Constraint(Protocol):
    """Which tokens may come next. One sequence's own, and used on the engine's thread only."""

    def accept(self, token_ids: Items[int]) -> None:
        """Tokens that were generated, in order. Those that do not fit are a failure."""

    def fill(self, words: NDArray[np.int32]) -> None:
        """Write the mask: bit i of word w is 1 when token 32 w + i may come next."""

    @property
    def failure(self) -> str | None:
        """Why no more masks come of it, as text for people; None while all is well."""


class TokenHistory:
    """Grows with its sequence. `token_ids` are the tokens that penalties look at, each once, beside their counts."""

    def __init__(self, num_prompt: int, counts_prompt: bool, constraint: Constraint | None) -> None:
        """`num_prompt`: tokens that were not generated. Without `counts_prompt` they are not looked at."""
        self.constraint = constraint
        self._num_prompt = num_prompt
        self._num_seen = 0 if counts_prompt else num_prompt
        self._num_accepted = num_prompt
        self._places: dict[int, int] = {}
        self._token_ids = array("q")
        self._counts = array("f")

    def count(self, token_ids: Items[int]) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Tokens seen, and how often each was generated, for a sequence that has come to `token_ids`."""
        for position in range(self._num_seen, len(token_ids)):
            self._note(token_ids[position], position >= self._num_prompt)
        self._num_seen = max(self._num_seen, len(token_ids))
        return np.array(self._token_ids, dtype=np.int64), np.array(self._counts, dtype=np.float32)

    def advance(self, token_ids: Items[int]) -> Constraint:
        """The constraint, led to where `token_ids` ends."""
        assert self.constraint is not None
        if self._num_accepted < len(token_ids):
            self.constraint.accept(token_ids[self._num_accepted :])
            self._num_accepted = len(token_ids)
        return self.constraint

    def _note(self, token_id: int, is_generated: bool) -> None:
        place = self._places.get(token_id)
        if place is None:
            self._places[token_id] = place = len(self._token_ids)
            self._token_ids.append(token_id)
            self._counts.append(0.0)
        self._counts[place] += is_generated
