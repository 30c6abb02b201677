"""Who a request belongs with: one signal out of the many headers and fields that clients name their sessions in.

It is a hint for placing and nothing else: what is seen of it behind the gateway is a digest, another one for every
tenant. Headers that name a worker, as some routers take them, are not read at all.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

# one signal under many names; the first usable one counts, and those of the body come after them
HEADERS = (
    "x-session-affinity",
    "x-session-id",
    "session-id",
    "x-claude-code-session-id",
    "x-dynamo-session-id",
    "x-smg-routing-key",
)
# until keys are checked, whoever shows the same one is taken for the same tenant
CREDENTIALS = ("authorization", "x-api-key")
MAX_HINT_CHARS = 256


@dataclass(frozen=True, slots=True)
class Session:
    """What came beside a request: whose it is, and the session it names. Both may be empty."""

    tenant: str = ""
    hint: str = ""

    def digest(self, own_hint: str) -> bytes:
        """What the scheduler is told; `own_hint` is the request's own, which comes second. Empty without a session."""
        hint = self.hint or own_hint
        if not 1 <= len(hint) <= MAX_HINT_CHARS:
            return b""
        tenant_key = hashlib.blake2b(self.tenant.encode(), digest_size=32, person=b"weft-tenant").digest()
        return hashlib.blake2b(hint.encode(), key=tenant_key, digest_size=16, person=b"weft-session").digest()


def session_of(headers: Iterable[tuple[str | bytes, str | bytes]]) -> Session:
    """From HTTP headers or gRPC metadata, names in lower case."""
    given: dict[str, str] = {}
    for name, value in headers:
        given.setdefault(_text(name), _text(value))
    hints = (given.get(name, "") for name in HEADERS)
    tenant = next((given[name] for name in CREDENTIALS if given.get(name)), "")
    return Session(tenant, next((hint for hint in hints if 1 <= len(hint) <= MAX_HINT_CHARS), ""))


def _text(value: str | bytes) -> str:
    return value if isinstance(value, str) else value.decode("latin-1")
