"""Keys of KV blocks: in worker pools and in the shared store. The same in every process on every machine.

key(i) = BLAKE2b(key(i-1), token ids of block i); key(-1) = BLAKE2b(salt, extras).
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

from weft.request import ModelFingerprint

KEY_BYTES = 32


def root_key(cache_salt: bytes, extras: bytes = b"") -> bytes:
    """Return the parent key of a prompt's first block. `extras`: anything else that changes the KV, such as an adapter
    id.
    """
    digest = hashlib.blake2b(digest_size=KEY_BYTES, person=b"weft-kv-root")
    digest.update(len(cache_salt).to_bytes(4, "little"))
    digest.update(cache_salt)
    digest.update(extras)
    return digest.digest()


def tenant_tag(cache_salt: bytes) -> bytes:
    """Return 8 bytes that identify a tenant for quotas without its salt; empty without a salt."""
    return hashlib.blake2b(cache_salt, digest_size=8, person=b"weft-kv-tenant").digest() if cache_salt else b""


def block_key(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Return the key of one full block."""
    digest = hashlib.blake2b(parent, digest_size=KEY_BYTES, person=b"weft-kv-block")
    packed = array("I", token_ids)
    digest.update(packed.tobytes())
    return digest.digest()


def block_keys(token_ids: Sequence[int], block_tokens: int, cache_salt: bytes = b"") -> list[bytes]:
    """Return the keys of all full blocks in order; a partial last block has none."""
    keys: list[bytes] = []
    parent = root_key(cache_salt)
    for start in range(0, len(token_ids) - block_tokens + 1, block_tokens):
        parent = block_key(parent, token_ids[start : start + block_tokens])
        keys.append(parent)
    return keys


def reusable_blocks(num_tokens: int, block_tokens: int) -> int:
    """Return how many leading blocks may come from a cache: the logits need at least one computed token."""
    return (num_tokens - 1) // block_tokens


def fingerprint_digest(fingerprint: ModelFingerprint) -> bytes:
    """Return 16 bytes for everything that two workers must share before they exchange blocks."""
    fields = (
        fingerprint.weights_hash,
        fingerprint.kv_dtype,
        str(fingerprint.block_tokens),
        str(fingerprint.block_bytes),
        fingerprint.layout,
    )
    return hashlib.blake2b("\0".join(fields).encode(), digest_size=16, person=b"weft-kv-model").digest()


def store_key(fingerprint: bytes, key: bytes, checksum: int) -> str:
    """Return a block's name in the Mooncake Store.

    Store objects are immutable, and two workers may round differently. The checksum in the name makes each name stand
    for one content.
    """
    return f"weft/{fingerprint.hex()}/{key.hex()}/{checksum:016x}"
