"""A block as it lies on disk: a header that names and checks it, then its bytes. Knows no files."""

from __future__ import annotations

import struct
from dataclasses import dataclass

import xxhash

# magic, fingerprint, tenant, length of the key, key, length of the tenant, 2 bytes of padding, idle seconds, size,
# checksum, time of storing
_FIELDS = struct.Struct("<8s16s8sB64sB2xIQQd")
_SUM = struct.Struct("<Q")
FINGERPRINT_BYTES = 16
HEADER_BYTES = _FIELDS.size + _SUM.size
MAGIC = b"weftkv01"


@dataclass(frozen=True, slots=True)
class RecordHeader:
    """`checksum` is the xxh3_64 of the block's bytes, `stored_at` in seconds since the epoch; 0 `idle_seconds`: any."""

    fingerprint: bytes
    tenant: bytes
    key: bytes
    size_bytes: int
    checksum: int
    stored_at: float
    idle_seconds: int = 0

    @property
    def record_bytes(self) -> int:
        """Header and block."""
        return HEADER_BYTES + self.size_bytes


def pack(header: RecordHeader) -> bytes:
    """The header's bytes, its own checksum last."""
    fields = _FIELDS.pack(
        MAGIC,
        header.fingerprint,
        header.tenant,
        len(header.key),
        header.key,
        len(header.tenant),
        header.idle_seconds,
        header.size_bytes,
        header.checksum,
        header.stored_at,
    )
    return fields + _SUM.pack(xxhash.xxh3_64_intdigest(fields))


def unpack(data: bytes) -> RecordHeader | None:
    """None for anything that `pack` did not write whole."""
    if len(data) != HEADER_BYTES:
        return None
    fields = data[: _FIELDS.size]
    if _SUM.unpack(data[_FIELDS.size :])[0] != xxhash.xxh3_64_intdigest(fields):
        return None
    values = _FIELDS.unpack(fields)
    magic, fingerprint, tenant, key_bytes, key, tenant_bytes = values[:6]
    idle_seconds, size_bytes, checksum, stored_at = values[6:]
    if magic != MAGIC:
        return None
    # records that were written before the length was have 0 there
    tenant = tenant[: tenant_bytes or len(tenant.rstrip(b"\0"))]
    return RecordHeader(fingerprint, tenant, key[:key_bytes], size_bytes, checksum, stored_at, idle_seconds)
