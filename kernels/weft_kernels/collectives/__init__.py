"""Sums and gathers of tensors over the ranks of a group.

All ranks of a sum get the same bits, for every number of rows: the partial results are added in the order of the ranks,
in float32, and rounded once. Replicated residual streams feed routers on every rank, where one bit of difference may
choose another expert.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor


class Comm(Protocol):
    """The collectives of one rank. All ranks of a group call the same ones, in the same order and with equal shapes."""

    @property
    def rank(self) -> int:
        """Place of this rank in the group; 0 is the leader."""

    @property
    def size(self) -> int:
        """Number of ranks."""

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum of the ranks' tensors, on every rank; see `sum_in_order`."""

    def gather(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        """Return the ranks' columns [n, sum of widths] side by side on the leader, and `x` on the others.

        x: [n, widths[rank]].
        """

    @property
    def native(self) -> ctypes.Structure | None:
        """What native kernels need to sum over the ranks themselves; None if they cannot, or if there is one rank."""

    def check(self) -> None:
        """Raise an error if a native kernel could not sum, because a rank is gone."""


class Alone:
    """A group of one rank."""

    rank, size, native = 0, 1, None

    def sum(self, x: Tensor) -> Tensor:
        """Return `x`."""
        return x

    def gather(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        """Return `x`."""
        return x

    def check(self) -> None:
        """No rank can be gone."""


def sum_in_order(parts: Sequence[Tensor]) -> Tensor:
    """Add the ranks' partial results in the order of the ranks, in float32, and round once to their dtype."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total.to(parts[0].dtype)


def join_columns(parts: Sequence[Tensor]) -> Tensor:
    """Put the ranks' columns side by side."""
    return torch.cat(list(parts), dim=-1)
