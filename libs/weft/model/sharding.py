"""Parts of tensors, for ranks that load only their shard of a model. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from weft.errors import BadCheckpoint


@dataclass(frozen=True, slots=True)
class ShardSlice:
    """Index ranges [start, stop) of dimension `dim`, joined in their order.

    Of a linear weight [outputs, inputs], `dim` 0 are rows and `dim` 1 columns, in every stored format. A fused
    gate_up tensor takes two ranges, one from each half.
    """

    dim: int
    ranges: tuple[tuple[int, int], ...]

    @property
    def size(self) -> int:
        """Number of indices in all ranges together."""
        return sum(stop - start for start, stop in self.ranges)

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        """Raise ValueError if a range does not lie inside a tensor of this shape."""
        if not self.ranges or not 0 <= self.dim < len(shape):
            raise ValueError(f"slice of {name}: dimension {self.dim} of {list(shape)} has no range; name one")
        for start, stop in self.ranges:
            if not 0 <= start < stop <= shape[self.dim]:
                raise ValueError(
                    f"slice of {name}: [{start}, {stop}) is not inside dimension {self.dim} of {list(shape)}"
                )

    def in_blocks(self, name: str, block: int, size: int) -> ShardSlice:
        """Return the slice in units of `block` indices, for a tensor that holds one element for each block.

        `size` is that of the dimension in single indices. Raises BadCheckpoint for a cut inside a block.
        """
        ranges = []
        for number, (start, stop) in enumerate(self.ranges, 1):
            is_end = stop == size and number == len(self.ranges)
            if start % block or (stop % block and not is_end):
                raise BadCheckpoint(
                    f"tensor {name}: [{start}, {stop}) of dimension {self.dim} cuts a block of {block}; "
                    f"choose a layout that cuts at multiples of {block}"
                )
            ranges.append((start // block, -(-stop // block)))
        return ShardSlice(self.dim, tuple(ranges))
