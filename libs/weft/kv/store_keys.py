"""What blocks are called in the shared store. The same in every process."""

from __future__ import annotations

import hashlib

from weft.request import ModelFingerprint


def fingerprint_digest(fingerprint: ModelFingerprint) -> bytes:
    """16 bytes that stand for everything two workers must share before blocks move between them."""
    fields = (
        fingerprint.weights_hash,
        fingerprint.kv_dtype,
        str(fingerprint.block_tokens),
        str(fingerprint.block_bytes),
        fingerprint.layout,
    )
    return hashlib.blake2b("\0".join(fields).encode(), digest_size=16, person=b"weft-kv-model").digest()


def store_key(fingerprint: bytes, key: bytes, checksum: int) -> str:
    """A block's name in the Mooncake Store.

    Objects there are immutable, and two workers may compute one block with different roundings: with the checksum in
    its name, a name stands for just these bytes.
    """
    return f"weft/{fingerprint.hex()}/{key.hex()}/{checksum:016x}"
