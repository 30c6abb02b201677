"""Events whose length says little of the text in them, for clients that ask with `include_obfuscation`: who sees the
packets of an encrypted stream can tell a good deal from the lengths of tokens (arXiv 2511.03675)."""

from __future__ import annotations

import secrets

# every event is a multiple of so many bytes
GRAIN_BYTES = 64
_BARE = len(b',"obfuscation":""')


def padded(event: bytes) -> bytes:
    """The same event with a field of random letters. It ends as all do: an object and an empty line."""
    missing = -(len(event) + _BARE) % GRAIN_BYTES
    letters = secrets.token_hex(GRAIN_BYTES // 2)[:missing].encode()
    return event.removesuffix(b"}\n\n") + b',"obfuscation":"' + letters + b'"}\n\n'
