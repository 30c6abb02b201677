"""Who goes first, as clients say it: vLLM's number in the body or a header, or a class by name in another header.

Lower is sooner here, as vLLM's clients count; the mesh counts the other way.


Who a request belongs with: one signal out of the many headers and fields that clients name their sessions in; whose
it is; and who goes first.

It is a hint for placing and nothing else: what is seen of it behind the gateway is a digest, another one for every
tenant. Headers that name a worker, as some routers take them, are not read at all.
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


@dataclass(frozen=True, slots=True)
class PriorityHint:
    """What the headers say: a number, if there is one, and what the named class is worth."""

    number: int | None = None
    by_class: int = 0

    def priority(self, own: int | None) -> int:
        """A number in the header goes before the request's own, as in vLLM; a class counts where there is no number."""
        if self.number is not None:
            return self.number
        return self.by_class if own is None else own


NO_PRIORITY_HINT = PriorityHint()


def read_priority_hint(headers: Mapping[str, str]) -> PriorityHint:
    """A class that nobody knows is the usual one, as in the router that the header comes from.

    Raises InvalidRequest for a number that is none.
    """
    by_class = CLASSES.get(headers.get(CLASS_HEADER, "").strip().lower(), 0)
    number = headers.get(NUMBER_HEADER)
    if number is None:
        return PriorityHint(None, by_class)
    if not _NUMBER.fullmatch(number) or abs(int(number)) > MAX_PRIORITY:
        message = f"{NUMBER_HEADER}: expected an integer from {-MAX_PRIORITY} to {MAX_PRIORITY}"
        raise InvalidRequest(message, NUMBER_HEADER, "invalid_value")
    return PriorityHint(int(number), by_class)


# one signal under many names; the first usable one counts, and those of the body come after them
SESSION_HEADERS = (
    "x-session-affinity",
    "x-session-id",
    "session-id",
    "x-claude-code-session-id",
    "x-dynamo-session-id",
    "x-smg-routing-key",
)
# a request that names no session of its own belongs to that of whoever started it
PARENT_HEADERS = ("x-parent-session-id", "x-dynamo-parent-session-id")
# where keys are not checked, whoever shows the same one is taken for the same tenant
CREDENTIALS = ("authorization", "x-api-key")
MAX_HINT_CHARS = 256
# nothing else is looked at; by their names in HTTP and in gRPC
HINT_HEADERS: dict[str | bytes, str] = {
    spelled: name
    for name in (*SESSION_HEADERS, *PARENT_HEADERS, *CREDENTIALS, NUMBER_HEADER, CLASS_HEADER)
    for spelled in (name, name.encode())
}


@dataclass(frozen=True, slots=True)
class RoutingHints:
    """What the mesh is told of it: digests, both perhaps empty, and a priority as engines count, higher goes first."""

    session: bytes = b""
    tenant: bytes = b""
    priority: int = 0


@dataclass(frozen=True, slots=True)
class ClientHints:
    """What came beside a request: whose it is, the session it names, how urgent it is, how urgent it may be at most
    (lower is sooner), and the session that it was started from. All names may be empty."""

    tenant: str = ""
    hint: str = ""
    priority_hint: PriorityHint = NO_PRIORITY_HINT
    min_priority: int = -MAX_PRIORITY
    parent: str = ""

    def with_principal(self, whose: Principal) -> ClientHints:
        """With what is known of the client by its key, which counts more than what it says."""
        if whose.key is None:
            return self
        return replace(self, tenant=whose.tenant, min_priority=whose.min_priority)

    def routing_hints(self, own_hint: str, own_priority: int | None) -> RoutingHints:
        """Together with what the request says of itself."""
        level = max(self.priority_hint.priority(own_priority), self.min_priority)
        return RoutingHints(self.digest(own_hint), self.tenant_digest, -level)

    def digest(self, own_hint: str) -> bytes:
        """What the scheduler is told; `own_hint` is the request's own, which comes second. Empty without a session."""
        hint = self.hint or own_hint or self.parent
        if not 1 <= len(hint) <= MAX_HINT_CHARS:
            return b""
        tenant_key = hashlib.blake2b(self.tenant.encode(), digest_size=32, person=b"weft-tenant").digest()
        return hashlib.blake2b(hint.encode(), key=tenant_key, digest_size=16, person=b"weft-session").digest()

    @property
    def tenant_digest(self) -> bytes:
        """Whose it is, as the mesh is told; empty where nobody says."""
        if not self.tenant:
            return b""
        return hashlib.blake2b(self.tenant.encode(), digest_size=16, person=b"weft-who-asks").digest()


def read_client_hints(headers: Iterable[tuple[str | bytes, str | bytes]]) -> ClientHints:
    """From HTTP headers or gRPC metadata, names in lower case. Raises InvalidRequest for a priority that is none."""
    given: dict[str, str] = {}
    for name, value in headers:
        if (known := HINT_HEADERS.get(name)) is not None:
            given.setdefault(known, _text(value))
    tenant = next((given[name] for name in CREDENTIALS if given.get(name)), "")
    return ClientHints(
        tenant, _first(SESSION_HEADERS, given), read_priority_hint(given), parent=_first(PARENT_HEADERS, given)
    )


def _first(names: Iterable[str], given: Mapping[str, str]) -> str:
    for name in names:
        if name in given and 1 <= len(given[name]) <= MAX_HINT_CHARS:
            return given[name]
    return ""


def _text(value: str | bytes) -> str:
    return value if isinstance(value, str) else value.decode("latin-1")
