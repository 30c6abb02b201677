"""Tokens that a sequence has seen, for penalties, and the state of its grammar. No torch.

Both depend only on the sequence's tokens: rebuilt elsewhere from prompt and generated tokens, they are the same.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Items
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class Constraint(Protocol):
    """Decides which tokens may come next. Belongs to one sequence and is used only on the engine's thread."""

    def accept(self, token_ids: Items[int]) -> None:
        """Advance by generated tokens, in order. A token that does not fit sets `failure`."""

    def fill(self, words: NDArray[np.int32]) -> None:
        """Write the mask: bit i of word w is 1 if token 32 w + i may come next."""

    @property
    def failure(self) -> str | None:
        """Why the constraint yields no more masks, as text for people; None while it works."""


class TokenHistory:
    """Follows one sequence forward. Both methods must be called with ascending ends.

    With `counts_prompt` penalties count the `num_prompt` prompt tokens too, otherwise only generated ones.
    """

    def __init__(self, num_prompt: int, counts_prompt: bool, constraint: Constraint | None) -> None:
        self.constraint = constraint
        self._num_prompt = num_prompt
        self._num_seen = 0 if counts_prompt else num_prompt
        self._num_accepted = num_prompt
        self._places: dict[int, int] = {}
        self._token_ids = array("q")  # each token once
        self._counts = array("f")  # how often the token at the same place was generated

    def count(self, token_ids: Items[int], end: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Return the distinct tokens of `token_ids[:end]`, and how often each was generated."""
        for position in range(self._num_seen, end):
            self._note(token_ids[position], position >= self._num_prompt)
        self._num_seen = max(self._num_seen, end)
        return np.array(self._token_ids, dtype=np.int64), np.array(self._counts, dtype=np.float32)

    def advance(self, token_ids: Items[int], end: int) -> Constraint:
        """Return the constraint after it has accepted the generated tokens of `token_ids[:end]`."""
        assert self.constraint is not None
        if self._num_accepted < end:
            self.constraint.accept(token_ids[self._num_accepted : end])
            self._num_accepted = end
        return self.constraint

    def _note(self, token_id: int, is_generated: bool) -> None:
        place = self._places.get(token_id)
        if place is None:
            self._places[token_id] = place = len(self._token_ids)
            self._token_ids.append(token_id)
            self._counts.append(0.0)
        self._counts[place] += is_generated
