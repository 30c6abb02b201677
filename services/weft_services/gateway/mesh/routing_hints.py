"""Reads hints for placement from a request's headers: tenant, session and priority.

Clients name sessions in many headers and fields; one value is chosen. Behind the gateway it appears only as a digest
that differs per tenant. Headers that name a worker, as some routers accept them, are ignored.

Priorities come from vLLM's number, in the body or a header, or from a class name in another header. In headers a lower
number goes first, as in vLLM; the mesh uses the opposite sign.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from weft.errors import InvalidRequest
from weft_services.gateway.access.authentication import Principal

MAX_PRIORITY = 10
NUMBER_HEADER = "x-vllm-priority"
CLASS_HEADER = "x-smg-priority"
CLASSES = {"interactive": -1, "default": 0, "batch": 1, "bulk": 1}
_NUMBER = re.compile(r"\s*[+-]?[0-9]{1,3}\s*", re.ASCII)


# Names of one hint; the first usable one counts, and all precede the fields of the body.
SESSION_HEADERS = (
    "x-session-affinity",
    "x-session-id",
    "session-id",
    "x-claude-code-session-id",
    "x-dynamo-session-id",
    "x-smg-routing-key",
)
# Fallback for a request without a session: the session of its parent.
PARENT_HEADERS = ("x-parent-session-id", "x-dynamo-parent-session-id")
# Without configured keys, equal credentials count as the same tenant.
CREDENTIALS = ("authorization", "x-api-key")
MAX_HINT_CHARS = 256
# The only headers read, by their HTTP and their gRPC names.
HINT_HEADERS: dict[str | bytes, str] = {
    spelled: name
    for name in (*SESSION_HEADERS, *PARENT_HEADERS, *CREDENTIALS, NUMBER_HEADER, CLASS_HEADER)
    for spelled in (name, name.encode())
}


@dataclass(frozen=True, slots=True)
class RoutingHints:
    """Hints as the mesh gets them: digests, empty if unknown, and a priority; the highest goes first."""

    session: bytes = b""
    tenant: bytes = b""
    priority: int = 0


@dataclass(frozen=True, slots=True)
class ClientHints:
    """Hints from the headers; all strings may be empty.

    - `tenant`: the credential.
    - `hint`: the session; `parent`: the session that started this one.
    - `priority`: the number as vLLM counts, and `class_priority` the value of the named class.
    - `min_priority`: lowest priority number allowed.
    """

    tenant: str = ""
    hint: str = ""
    priority: int | None = None
    class_priority: int = 0
    min_priority: int = -MAX_PRIORITY
    parent: str = ""

    def with_principal(self, principal: Principal) -> ClientHints:
        """Return the hints with tenant and priority limit from the API key; these override what the client claims."""
        if principal.key is None:
            return self
        return replace(self, tenant=principal.tenant, min_priority=principal.min_priority)

    def routing_hints(self, own_hint: str, own_priority: int | None) -> RoutingHints:
        """Combine the hints with those of the body. The headers' number precedes the body's; the class comes last."""
        priority = own_priority if self.priority is None else self.priority
        level = max(self.class_priority if priority is None else priority, self.min_priority)
        return RoutingHints(self.digest(own_hint), self.tenant_digest, -level)

    def digest(self, own_hint: str) -> bytes:
        """Return the session digest; empty without a session.

        A session in the headers precedes `own_hint`, the body's.
        """
        hint = self.hint or own_hint or self.parent
        if not 1 <= len(hint) <= MAX_HINT_CHARS:
            return b""
        tenant_key = hashlib.blake2b(self.tenant.encode(), digest_size=32, person=b"weft-tenant").digest()
        return hashlib.blake2b(hint.encode(), key=tenant_key, digest_size=16, person=b"weft-session").digest()

    @property
    def tenant_digest(self) -> bytes:
        """Digest of the tenant; empty if unknown."""
        if not self.tenant:
            return b""
        return hashlib.blake2b(self.tenant.encode(), digest_size=16, person=b"weft-tenant-id").digest()


def read_client_hints(headers: Iterable[tuple[str | bytes, str | bytes]]) -> ClientHints:
    """Read HTTP headers or gRPC metadata with lower-case names. Raises InvalidRequest for a malformed priority."""
    given: dict[str, str] = {}
    for name, value in headers:
        if (known := HINT_HEADERS.get(name)) is not None:
            given.setdefault(known, _text(value))
    return ClientHints(
        tenant=next((given[name] for name in CREDENTIALS if given.get(name)), ""),
        hint=_first(SESSION_HEADERS, given),
        priority=_priority(given.get(NUMBER_HEADER)),
        # An unknown class counts as default, as in the router that defines the header.
        class_priority=CLASSES.get(given.get(CLASS_HEADER, "").strip().lower(), 0),
        parent=_first(PARENT_HEADERS, given),
    )


def _priority(number: str | None) -> int | None:
    if number is not None and (not _NUMBER.fullmatch(number) or abs(int(number)) > MAX_PRIORITY):
        message = f"{NUMBER_HEADER}: expected an integer from {-MAX_PRIORITY} to {MAX_PRIORITY}"
        raise InvalidRequest(message, NUMBER_HEADER, "invalid_value")
    return None if number is None else int(number)


def _first(names: Iterable[str], given: Mapping[str, str]) -> str:
    for name in names:
        if name in given and 1 <= len(given[name]) <= MAX_HINT_CHARS:
            return given[name]
    return ""


def _text(value: str | bytes) -> str:
    return value if isinstance(value, str) else value.decode("latin-1")
