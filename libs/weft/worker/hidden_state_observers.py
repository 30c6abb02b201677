"""Observers of a prompt's hidden states: mean pooling for embeddings, and prompt logprobs.

Both work chunk by chunk. For logprobs, the logits of NUM_ROWS rows exist at a time; what stays of a position is its
token's logprob, its rank, and the best alternatives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from weft.engine.device_copier import DeviceCopier
from weft.request import PromptLogprobs
from weft_kernels.sampling import logprobs

# Logits exist for this many rows at a time; `weft.worker.memory_profile` measures their memory.
NUM_ROWS = 32
# Minimum tokens of a piece, if the prompt has as many. A chunk may be tens of tokens, and the number of queued messages
# to a gateway is bounded.
PIECE_TOKENS = 4096


class MeanPooling:
    """Sums hidden states over the chunks, on the device."""

    def __init__(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens
        self._sum: Tensor | None = None
        self._mean: Tensor | None = None

    def observe(self, start: int, hidden: Tensor, logits: Callable[[Tensor], Tensor]) -> None:
        total = hidden.sum(0, dtype=torch.float32)
        self._sum = total if start == 0 or self._sum is None else self._sum + total
        if start + len(hidden) == self._num_tokens:
            self._mean = DeviceCopier(hidden.device).download(self._sum / self._num_tokens)

    def mean(self) -> tuple[float, ...]:
        """Return the mean vector; valid once the first token has been sampled."""
        assert self._mean is not None
        return tuple(self._mean.tolist())


class PromptLogprobReader:
    """Computes logprobs of prompt tokens.

    The first token has no logprob, and the last position's logits belong to no prompt token.
    """

    def __init__(self, token_ids: Sequence[int], num_top: int) -> None:
        self._next = np.array(token_ids[1:], dtype=np.int64)
        self._num_top = num_top
        self._found: list[tuple[int, list[Tensor]]] = []

    def observe(self, start: int, hidden: Tensor, logits: Callable[[Tensor], Tensor]) -> None:
        if start == 0:
            self._found.clear()
        link = DeviceCopier(hidden.device)
        tokens = link.upload(self._next[start : start + len(hidden)])
        if not len(tokens):
            return
        scores = self._room(len(tokens), hidden.device)
        for first in range(0, len(tokens), NUM_ROWS):
            part = slice(first, min(first + NUM_ROWS, len(tokens)))
            for kept, found in zip(scores, self._score(logits(hidden[part]), tokens[part]), strict=True):
                kept[part] = found
        self._found.append((start + 1, [link.download(each) for each in scores]))

    def found(self) -> list[PromptLogprobs]:
        """Return the logprobs in order, with consecutive small chunks joined.

        Valid once the first token has been sampled.
        """
        groups: list[list[tuple[int, list[Tensor]]]] = []
        for start, scores in self._found:
            if not groups or start - groups[-1][0][0] >= PIECE_TOKENS:
                groups.append([])
            groups[-1].append((start, scores))
        return [_piece(group[0][0], [scores for _, scores in group]) for group in groups]

    def _room(self, num_tokens: int, device: torch.device) -> list[Tensor]:
        """Allocate the results of `_score` at once.

        Interleaved allocations would keep the memory of the logits from being reused.
        """
        numbers, places = torch.float32, torch.int64
        top = (self._num_top,)
        kinds: list[tuple[tuple[int, ...], torch.dtype]] = [((), numbers), ((), places), (top, places), (top, numbers)]
        return [torch.empty((num_tokens, *shape), dtype=dtype, device=device) for shape, dtype in kinds]

    def _score(self, logits: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        ranks = (logits > logits.gather(-1, tokens[:, None])).sum(-1) + 1
        chosen, values, ids = logprobs(logits, tokens, self._num_top)
        return chosen, ranks, ids, values


def _piece(start: int, chunks: Sequence[list[Tensor]]) -> PromptLogprobs:
    chosen, ranks, ids, values = (torch.cat(parts) for parts in zip(*chunks, strict=True))
    return PromptLogprobs(
        start=start,
        chosen=tuple(chosen.tolist()),
        ranks=tuple(ranks.tolist()),
        top_ids=tuple(ids.flatten().tolist()),
        top=tuple(values.flatten().tolist()),
        num_top=ids.shape[-1],
    )
