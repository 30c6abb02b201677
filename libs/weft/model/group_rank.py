"""One process of the group that runs a model: its part of every layer, and how it reaches the others."""

from __future__ import annotations

from dataclasses import dataclass, field

from weft.model.sharding import WHOLE, Shard
from weft_kernels.collectives import Alone, Comm


@dataclass(frozen=True, slots=True)
class GroupRank:
    """A rank of a group. `comm` connects the ranks that hold the same layers; without others it does nothing."""

    shard: Shard = WHOLE
    comm: Comm = field(default_factory=Alone)
