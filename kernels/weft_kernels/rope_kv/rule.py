"""What a model asks to be done to its heads."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class HeadRule:
    """What is done to a layer's queries and keys, in this order.

    `norms`: RMS norms by weights [dim], of queries and of keys (Qwen3). `is_rotated`: by the angles of their positions.
    `is_normed_last`: an RMS norm without weights (Llama 4).
    """

    norms: tuple[Tensor, Tensor] | None = None
    is_rotated: bool = True
    is_normed_last: bool = False
    eps: float = 0.0


ROTATED = HeadRule()
