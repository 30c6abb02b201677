"""From sequences to the changes of their logits: biases, penalties, bans before min_tokens, grammars' masks.

Knows what requests ask for; how logits are changed is `weft_kernels.logit_changes`' matter.
"""

from __future__ import annotations

from collections.abc import Sequence as Items

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from weft.engine.device_copy import DeviceCopier
from weft.engine.sequence import Sequence
from weft.engine.token_history import Constraint, TokenHistory
from weft_kernels.logit_changes import LogitChanges, apply_changes

Places = list[tuple[int, int]]


class LogitsProcessor:
    """Changes a step's logits. A sequence whose constraint has failed is left as it is, and named."""

    def __init__(self, vocab_size: int, eos_token_ids: tuple[int, ...], link: DeviceCopier) -> None:
        self._num_words = -(-vocab_size // 32)
        self._eos_token_ids = eos_token_ids
        self._upload = link.upload

    def apply(self, sequences: Items[Sequence], logits: Tensor) -> tuple[Tensor, dict[int, str]]:
        """The logits to sample from, and for rows whose sequence must end: why. The logits given are not changed."""
        if not any(changes_logits(each) for each in sequences):
            return logits, {}
        (rows, masks), failures = self._masks(sequences)
        seen, penalties = self._seen(sequences)
        bias, banned = self._bias(sequences), self._banned(sequences)
        return apply_changes(logits, LogitChanges(bias, seen, penalties, banned, rows, masks)), failures

    def _bias(self, sequences: Items[Sequence]) -> tuple[Tensor, Tensor] | None:
        places: Places = []
        addends: list[float] = []
        for row, sequence in enumerate(sequences):
            for token, bias in sequence.spec.sampling.logit_bias:
                places.append((row, token))
                addends.append(bias)
        if not places:
            return None
        return self._places(places), self._upload(np.array(addends, dtype=np.float32))

    def _seen(self, sequences: Items[Sequence]) -> tuple[tuple[Tensor, Tensor] | None, Tensor | None]:
        rows: list[NDArray[np.int64]] = []
        tokens: list[NDArray[np.int64]] = []
        counts: list[NDArray[np.float32]] = []
        for row, sequence in enumerate(sequences):
            if sequence.spec.sampling.has_penalties:
                ids, times = token_history_of(sequence).count(sequence.token_ids)
                rows.append(np.full(len(ids), row))
                tokens.append(ids)
                counts.append(times)
        if not rows:
            return None, None
        places = np.stack([np.concatenate(rows), np.concatenate(tokens)])
        params = [each.spec.sampling for each in sequences]
        penalties = [[each.repetition_penalty, each.frequency_penalty, each.presence_penalty] for each in params]
        seen = (self._upload(places), self._upload(np.concatenate(counts)))
        return seen, self._upload(np.array(penalties, dtype=np.float32))

    def _banned(self, sequences: Items[Sequence]) -> Tensor | None:
        free = [(row, each) for row, each in enumerate(sequences) if each.spec.constraint is None]
        places = [(row, token) for row, sequence in free for token in self._ends(sequence)]
        return self._places(places) if places else None

    def _ends(self, sequence: Sequence) -> set[int]:
        """Tokens that would end it too early."""
        sampling = sequence.spec.sampling
        if sequence.num_preceding >= sampling.min_tokens:
            return set()
        return {*(() if sequence.ignores_eos else self._eos_token_ids), *sampling.stop_token_ids}

    def _masks(self, sequences: Items[Sequence]) -> tuple[tuple[Tensor | None, Tensor | None], dict[int, str]]:
        failures: dict[int, str] = {}
        rows: list[int] = []
        masks: list[NDArray[np.int32]] = []
        for row, sequence in enumerate(sequences):
            if sequence.spec.constraint is None:
                continue
            constraint = token_history_of(sequence).advance(sequence.token_ids)
            mask, failure = self._mask(constraint, self._ends(sequence))
            if failure is None:
                rows.append(row)
                masks.append(mask)
            else:
                failures[row] = failure
        if not rows:
            return (None, None), failures
        return (self._upload(np.array(rows)), self._upload(np.stack(masks))), failures

    def _mask(self, constraint: Constraint, ends: set[int]) -> tuple[NDArray[np.int32], str | None]:
        """Without `ends`, but where the grammar leaves nothing else: an answer that is complete ends, however short."""
        words = np.zeros(self._num_words, dtype=np.int32)
        if constraint.failure is None:
            constraint.fill(words)
        others = words.copy()
        for token in ends:
            others.view(np.uint32)[token // 32] &= ~np.uint32(1 << token % 32)
        return (others if others.any() else words), constraint.failure

    def _places(self, places: Places) -> Tensor:
        return self._upload(np.array(places).T)


def changes_logits(sequence: Sequence) -> bool:
    """Is the next token chosen from anything but the model's own logits."""
    sampling = sequence.spec.sampling
    if sampling.logit_bias or sequence.needs_host_tokens:
        return True
    return sequence.num_preceding < sampling.min_tokens


def token_history_of(sequence: Sequence) -> TokenHistory:
    """Made when it is first asked for."""
    if sequence.history is None:
        spec = sequence.spec
        num_prompt = len(spec.token_ids) - spec.resumed_tokens
        sequence.history = TokenHistory(num_prompt, spec.sampling.repetition_penalty != 1.0, spec.constraint)
    return sequence.history
