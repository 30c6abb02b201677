"""Which block lies in the store, as far as workers have said; the store may have evicted it since. Pure bookkeeping."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

MAX_BLOCKS = 262_144  # about 60 MB


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """A block and the xxh3_64 of its bytes."""

    key: bytes
    checksum: int
    size_bytes: int


class BlockIndex:
    """Least recently matched blocks are forgotten first. Models are told apart by the digest of their fingerprint."""

    def __init__(self, max_blocks: int = MAX_BLOCKS) -> None:
        self._max_blocks = max_blocks
        self._blocks: OrderedDict[tuple[bytes, bytes], StoredBlock] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def add(self, fingerprint: bytes, blocks: Iterable[StoredBlock]) -> None:
        """The newest word on a key counts."""
        for block in blocks:
            self._blocks[fingerprint, block.key] = block
            self._blocks.move_to_end((fingerprint, block.key))
        while len(self._blocks) > self._max_blocks:
            self._blocks.popitem(last=False)

    def leading_run(self, fingerprint: bytes, keys: Sequence[bytes]) -> list[StoredBlock]:
        """The blocks of the first keys, up to the first that is unknown."""
        run: list[StoredBlock] = []
        for key in keys:
            block = self._blocks.get((fingerprint, key))
            if block is None:
                break
            self._blocks.move_to_end((fingerprint, key))
            run.append(block)
        return run

    def find(self, fingerprint: bytes, keys: Sequence[bytes]) -> list[StoredBlock]:
        """The blocks of those keys that are known."""
        return [block for key in keys for block in self.leading_run(fingerprint, (key,))]

    def drop(self, fingerprint: bytes, blocks: Iterable[StoredBlock]) -> None:
        """They are gone from the store, unless somebody has put other bytes meanwhile."""
        for block in blocks:
            if self._blocks.get((fingerprint, block.key)) == block:
                del self._blocks[fingerprint, block.key]

    def clear(self) -> None:
        """The store has been started anew."""
        self._blocks.clear()
