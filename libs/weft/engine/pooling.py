"""The mean of a prompt's last hidden states, added up over its chunks on the device. Knows no batches."""

from __future__ import annotations

from collections.abc import Sequence as Items

import torch
from torch import Tensor

from weft.engine.batch import Work
from weft.engine.sequence import Sequence


def add_up(works: Items[Work], hidden: Tensor) -> None:
    """`hidden`: the rows of all tokens of these works, one after the other."""
    for work, rows in zip(works, torch.split(hidden, [work.num_tokens for work in works]), strict=True):
        total, sequence = rows.sum(0, dtype=torch.float32), work.sequence
        sequence.hidden_sum = total if sequence.hidden_sum is None else sequence.hidden_sum + total


def mean(sequence: Sequence) -> Tensor:
    """[hidden] float32. All of the prompt has been added up."""
    total: Tensor = sequence.hidden_sum
    return total / sequence.num_prompt
