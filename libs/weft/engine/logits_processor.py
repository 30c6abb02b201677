"""Changes logits before sampling: biases, penalties, bans of end tokens before `min_tokens`, grammar masks."""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from weft.engine.device_copy import DeviceCopier
from weft.engine.sequence import Sequence
from weft.engine.token_history import Constraint, TokenHistory
from weft_kernels.logit_changes import LogitChanges, apply_changes

Places = list[tuple[int, int]]


class SampledPosition(NamedTuple):
    """A row of logits: the sequence, and the position at which the sampled token will stand.

    If `sequence.needs_host_tokens`, the host must know all tokens before `position`.
    """

    sequence: Sequence
    position: int

    @property
    def changes_logits(self) -> bool:
        """True if the token is not chosen from the model's own logits alone."""
        sampling = self.sequence.spec.sampling
        if sampling.logit_bias or self.sequence.needs_host_tokens:
            return True
        return self.sequence.num_generated_before(self.position) < sampling.min_tokens


class LogitsProcessor:
    """Processes the logits of one step. Positions of one sequence must come in ascending order."""

    def __init__(self, vocab_size: int, eos_token_ids: tuple[int, ...], copier: DeviceCopier) -> None:
        self._num_words = -(-vocab_size // 32)
        self._eos_token_ids = eos_token_ids
        self._upload = copier.upload

    def apply(self, rows: Items[SampledPosition], logits: Tensor) -> tuple[Tensor, dict[int, str]]:
        """Return the logits to sample from, and the reason for each row with a failed grammar.

        `logits` is not changed. Rows with a failed grammar keep their logits.
        """
        if not any(row.changes_logits for row in rows):
            return logits, {}
        (masked, masks), failures = self._masks(rows)
        seen, penalties = self._seen(rows)
        bias, banned = self._bias(rows), self._banned(rows)
        return apply_changes(logits, LogitChanges(bias, seen, penalties, banned, masked, masks)), failures

    def _bias(self, rows: Items[SampledPosition]) -> tuple[Tensor, Tensor] | None:
        places: Places = []
        addends: list[float] = []
        for index, row in enumerate(rows):
            for token, bias in row.sequence.spec.sampling.logit_bias:
                places.append((index, token))
                addends.append(bias)
        if not places:
            return None
        return self._places(places), self._upload(np.array(addends, dtype=np.float32))

    def _seen(self, rows: Items[SampledPosition]) -> tuple[tuple[Tensor, Tensor] | None, Tensor | None]:
        indices: list[NDArray[np.int64]] = []
        tokens: list[NDArray[np.int64]] = []
        counts: list[NDArray[np.float32]] = []
        for index, (sequence, position) in enumerate(rows):
            if sequence.spec.sampling.has_penalties:
                ids, times = token_history_of(sequence).count(sequence.token_ids, position)
                indices.append(np.full(len(ids), index))
                tokens.append(ids)
                counts.append(times)
        if not indices:
            return None, None
        places = np.stack([np.concatenate(indices), np.concatenate(tokens)])
        params = [row.sequence.spec.sampling for row in rows]
        penalties = [[each.repetition_penalty, each.frequency_penalty, each.presence_penalty] for each in params]
        seen = (self._upload(places), self._upload(np.concatenate(counts)))
        return seen, self._upload(np.array(penalties, dtype=np.float32))

    def _banned(self, rows: Items[SampledPosition]) -> Tensor | None:
        places = [
            (index, token)
            for index, row in enumerate(rows)
            if row.sequence.spec.constraint is None
            for token in self._early_ends(row)
        ]
        return self._places(places) if places else None

    def _early_ends(self, row: SampledPosition) -> set[int]:
        """Return the tokens that would end the sequence before `min_tokens`."""
        sequence, sampling = row.sequence, row.sequence.spec.sampling
        if sequence.num_generated_before(row.position) >= sampling.min_tokens:
            return set()
        return {*(() if sequence.ignores_eos else self._eos_token_ids), *sampling.stop_token_ids}

    def _masks(self, rows: Items[SampledPosition]) -> tuple[tuple[Tensor | None, Tensor | None], dict[int, str]]:
        failures: dict[int, str] = {}
        indices: list[int] = []
        masks: list[NDArray[np.int32]] = []
        for index, row in enumerate(rows):
            if row.sequence.spec.constraint is None:
                continue
            constraint = token_history_of(row.sequence).advance(row.sequence.token_ids, row.position)
            mask, failure = self._mask(constraint, self._early_ends(row))
            if failure is None:
                indices.append(index)
                masks.append(mask)
            else:
                failures[index] = failure
        if not indices:
            return (None, None), failures
        return (self._upload(np.array(indices)), self._upload(np.stack(masks))), failures

    def _mask(self, constraint: Constraint, ends: set[int]) -> tuple[NDArray[np.int32], str | None]:
        """Return the grammar's mask without `ends`, and the grammar's failure if it has one.

        If the grammar allows only end tokens, they stay allowed: a complete answer may end before `min_tokens`.
        """
        words = np.zeros(self._num_words, dtype=np.int32)
        if constraint.failure is None:
            constraint.fill(words)
        others = words.copy()
        for token in ends:
            others.view(np.uint32)[token // 32] &= ~np.uint32(1 << token % 32)
        return (others if others.any() else words), constraint.failure

    def _places(self, places: Places) -> Tensor:
        return self._upload(np.array(places).T)


def token_history_of(sequence: Sequence) -> TokenHistory:
    """Return the sequence's history. It is created on first use, because most sequences need none."""
    if sequence.history is None:
        spec = sequence.spec
        num_prompt = len(spec.token_ids) - spec.resumed_tokens
        sequence.history = TokenHistory(num_prompt, spec.sampling.repetition_penalty != 1.0, spec.constraint)
    return sequence.history
