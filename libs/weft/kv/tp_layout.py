"""Layout of a block over tensor-parallel ranks, and the copies between sides of different degree. Pure arithmetic.

A block's outermost dimension is the key head, so a rank holds one contiguous range. With more ranks than heads,
neighbouring ranks hold the same head.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HeadRange:
    """Key heads `first` ... `first` + `count` - 1 of every block."""

    first: int
    count: int

    @property
    def end(self) -> int:
        """The head after the last one."""
        return self.first + self.count


@dataclass(frozen=True, slots=True)
class RankCopy:
    """Bytes of one block: from `source_offset` of the source rank's part to `offset` of ours."""

    source_rank: int
    source_offset: int
    offset: int
    size_bytes: int


def head_range(num_heads: int, degree: int, rank: int) -> HeadRange:
    """Return a rank's heads. Raises ValueError unless heads and ranks divide evenly."""
    if not 0 <= rank < degree:
        raise ValueError(f"no rank {rank} of {degree}")
    if max(num_heads, degree) % min(num_heads, degree):
        raise ValueError(f"{num_heads} key heads cannot be shared by {degree} ranks")
    if degree <= num_heads:
        count = num_heads // degree
        return HeadRange(rank * count, count)
    return HeadRange(rank // (degree // num_heads), 1)


def rank_copies(num_heads: int, head_bytes: int, source_degree: int, degree: int, rank: int) -> tuple[RankCopy, ...]:
    """Return what `rank` of `degree` pulls of each block, in order and in as few copies as possible.

    If several source ranks hold a head, each puller uses another one.
    """
    own = head_range(num_heads, degree, rank)
    num_copies = max(1, source_degree // num_heads)
    runs = []
    for source_rank in range(rank % num_copies, source_degree, num_copies):
        source = head_range(num_heads, source_degree, source_rank)
        first, end = max(own.first, source.first), min(own.end, source.end)
        if first < end:
            offsets = [(first - side.first) * head_bytes for side in (source, own)]
            runs.append(RankCopy(source_rank, offsets[0], offsets[1], (end - first) * head_bytes))
    return tuple(runs)
