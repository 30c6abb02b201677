"""Whose request this is: set once at the edge, for HTTP and gRPC alike, and read wherever it matters.

A context variable, so that no endpoint has to pass it on and none can forget to.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass

from weft.api_keys import MOST_URGENT, ApiKey
from weft.errors import Unauthenticated
from weft_services.gateway.access.limiter import Level, Limiter


@dataclass(frozen=True, slots=True)
class Visitor:
    """A client with its key, or without one where the mesh asks for none. `is_among_others`: it has to leave them
    room. `is_sent`: by a proxy that checks who may come, so that where it comes from says where the proxy is.
    `current`: what a key is by now, None once it was revoked."""

    key: ApiKey | None = None
    limiter: Limiter | None = None
    is_among_others: bool = False
    is_sent: bool = False
    current: Callable[[ApiKey], ApiKey | None] = lambda key: key

    @property
    def name(self) -> str:
        """For the access log."""
        return self.key.name if self.key else ""

    @property
    def tenant(self) -> str:
        """Empty without a key."""
        return self.key.owner if self.key else ""

    @property
    def cache_salt(self) -> bytes:
        """Without keys everybody shares one cache."""
        return self.key.cache_salt if self.key else b""

    @property
    def most_urgent(self) -> int:
        """The lowest priority that counts, lower being sooner."""
        return self.key.priority if self.key else MOST_URGENT

    @property
    def is_operator(self) -> bool:
        """May it see and steer the mesh. Where no keys are asked for, whoever reaches the listener may."""
        return self.key is None or self.key.operator

    def may_use(self, model: str) -> bool:
        """Is this one of its models."""
        return self.key is None or self.key.may_use(model)

    @property
    def has_limits(self) -> bool:
        """Of requests or tokens."""
        return self.key is not None and bool(self.key.requests_per_minute or self.key.tokens_per_minute)

    def levels(self) -> list[Level]:
        """How full its limits are; empty where it has none."""
        return self.limiter.levels(self.key) if self.key and self.limiter else []

    def check(self) -> None:
        """Before any work. Raises RateLimited where it is known that there is no room."""
        if self.key and self.limiter:
            self.limiter.check(self.key)

    async def take(self, tokens: int) -> None:
        """A request with a prompt of so many tokens. Raises RateLimited; it counts as a request all the same."""
        if self.key and self.limiter:
            await self.limiter.take(self.key, tokens)

    @property
    def is_revoked(self) -> bool:
        """Its key counts no more, whatever may have become of what it may do."""
        return self.key is not None and self.current(self.key) is None

    def check_key(self) -> None:
        """For what goes on without end after the key was shown. Raises Unauthenticated where it counts no more."""
        if self.key is not None and self.current(self.key) != self.key:
            raise Unauthenticated("this API key was revoked or changed")

    def charge(self, requests: int = 0, tokens: int = 0) -> None:
        """What was used without asking: generated tokens, and requests that were refused."""
        if self.key and self.limiter and (requests or tokens):
            self.limiter.charge(self.key, requests, tokens)


visitor: ContextVar[Visitor] = ContextVar("visitor", default=Visitor())  # noqa: B039 it is frozen
