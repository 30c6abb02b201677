"""Block keys: which tokens, after which tokens, for whom. The same in every process, on every machine.

key(i) = BLAKE2b(key(i-1), token ids of block i); key(-1) = BLAKE2b(salt, extras). Knows nothing of pools.

What blocks are called in the shared store. The same in every process.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

from weft.request import ModelFingerprint

KEY_BYTES = 32


def root_key(cache_salt: bytes, extras: bytes = b"") -> bytes:
    """The parent of a prompt's first block. `extras`: whatever else changes the KV, such as an adapter id."""
    digest = hashlib.blake2b(digest_size=KEY_BYTES, person=b"weft-kv-root")
    digest.update(len(cache_salt).to_bytes(4, "little"))
    digest.update(cache_salt)
    digest.update(extras)
    return digest.digest()


def tenant_tag(cache_salt: bytes) -> bytes:
    """8 bytes by which quotas tell tenants apart without knowing their salts; empty for those who share."""
    return hashlib.blake2b(cache_salt, digest_size=8, person=b"weft-kv-tenant").digest() if cache_salt else b""


def block_key(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """The key of one full block."""
    digest = hashlib.blake2b(parent, digest_size=KEY_BYTES, person=b"weft-kv-block")
    packed = array("I", token_ids)
    digest.update(packed.tobytes())
    return digest.digest()


def block_keys(token_ids: Sequence[int], block_tokens: int, cache_salt: bytes = b"") -> list[bytes]:
    """Keys of all full blocks of a sequence, in order; the partial tail has none."""
    keys: list[bytes] = []
    parent = root_key(cache_salt)
    for start in range(0, len(token_ids) - block_tokens + 1, block_tokens):
        parent = block_key(parent, token_ids[start : start + block_tokens])
        keys.append(parent)
    return keys


def reusable_blocks(num_tokens: int, block_tokens: int) -> int:
    """How many leading blocks of a prompt may come from a cache: at least one token must be computed for its logits."""
    return (num_tokens - 1) // block_tokens


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
