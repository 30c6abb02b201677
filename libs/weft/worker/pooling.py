"""The mean of a prompt's last hidden states, added up over its chunks on the device. Knows no batches."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from weft.engine.device import Link


class MeanHidden:
    """A `PromptReader`."""

    def __init__(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens
        self._sum: Tensor | None = None
        self._mean: Tensor | None = None

    def read(self, start: int, hidden: Tensor, logits: Callable[[Tensor], Tensor]) -> None:
        """See `PromptReader`."""
        total = hidden.sum(0, dtype=torch.float32)
        self._sum = total if start == 0 or self._sum is None else self._sum + total
        if start + len(hidden) == self._num_tokens:
            self._mean = Link(hidden.device).download(self._sum / self._num_tokens)

    def mean(self) -> tuple[float, ...]:
        """As many as the model's hidden size; once the first token is told."""
        assert self._mean is not None
        return tuple(self._mean.tolist())
