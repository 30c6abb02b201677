"""Which bytes of a block belong to which tensor-parallel rank, and who sends what when the two sides differ in degree.

A block's outermost dimension is the key head, so a rank's share is one contiguous run of it. With more ranks than
heads, neighbouring ranks hold the same head. Pure arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Share:
    """Key heads `first` ... `first` + `count` - 1 of every block."""

    first: int
    count: int

    @property
    def end(self) -> int:
        """The first head behind."""
        return self.first + self.count


@dataclass(frozen=True, slots=True)
class Move:
    """A run of one block: from the lender's rank, at this offset of its share, to this offset of ours."""

    lender_rank: int
    lender_offset: int
    offset: int
    size_bytes: int


def share(num_heads: int, degree: int, rank: int) -> Share:
    """A rank's part. Raises ValueError where heads and ranks do not divide evenly."""
    if not 0 <= rank < degree:
        raise ValueError(f"no rank {rank} of {degree}")
    if max(num_heads, degree) % min(num_heads, degree):
        raise ValueError(f"{num_heads} key heads cannot be shared by {degree} ranks")
    if degree <= num_heads:
        count = num_heads // degree
        return Share(rank * count, count)
    return Share(rank // (degree // num_heads), 1)


def moves(num_heads: int, head_bytes: int, lender_degree: int, degree: int, rank: int) -> tuple[Move, ...]:
    """What `rank` of `degree` pulls of each block, in order and as few runs as can be.

    Of several lenders that hold the same head each borrower takes another one.
    """
    own = share(num_heads, degree, rank)
    num_copies = max(1, lender_degree // num_heads)
    runs = []
    for lender_rank in range(rank % num_copies, lender_degree, num_copies):
        theirs = share(num_heads, lender_degree, lender_rank)
        first, end = max(own.first, theirs.first), min(own.end, theirs.end)
        if first < end:
            offsets = [(first - side.first) * head_bytes for side in (theirs, own)]
            runs.append(Move(lender_rank, offsets[0], offsets[1], (end - first) * head_bytes))
    return tuple(runs)
