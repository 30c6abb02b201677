"""Random ids and seeds that nobody can guess. One system call yields many of them, since it is a slow one in places."""

from __future__ import annotations

import os

ID_BYTES = 16
_NUM_AT_ONCE = 256
_left: list[bytes] = []
# a forked child must not give out what its parent does
os.register_at_fork(after_in_child=_left.clear)


def new_id() -> str:
    """32 hexadecimal digits."""
    return _take().hex()


def new_seed() -> int:
    """63 bits."""
    return int.from_bytes(_take()[:8]) >> 1


def _take() -> bytes:
    """Safe in threads: `pop` gives nothing out twice."""
    try:
        return _left.pop()
    except IndexError:
        fresh = os.urandom(ID_BYTES * _NUM_AT_ONCE)
        _left.extend(fresh[at : at + ID_BYTES] for at in range(ID_BYTES, len(fresh), ID_BYTES))
        return fresh[:ID_BYTES]
