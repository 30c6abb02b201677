"""Unpredictable random ids and seeds. One system call yields 256 of them, since it is slow on some systems."""

from __future__ import annotations

import os

ID_BYTES = 16
_NUM_AT_ONCE = 256
_left: list[bytes] = []
# A forked child must not hand out the same ids as its parent.
os.register_at_fork(after_in_child=_left.clear)


def new_id() -> str:
    """Return 32 random hexadecimal digits."""
    return _take().hex()


def new_seed() -> int:
    """Return a random integer of 63 bits."""
    return int.from_bytes(_take()[:8]) >> 1


def _take() -> bytes:
    """Thread-safe: `pop` returns no entry twice."""
    try:
        return _left.pop()
    except IndexError:
        fresh = os.urandom(ID_BYTES * _NUM_AT_ONCE)
        _left.extend(fresh[at : at + ID_BYTES] for at in range(ID_BYTES, len(fresh), ID_BYTES))
        return fresh[:ID_BYTES]
