"""API key authentication. The listeners set the principal of each request; all other modules read it.

It is a context variable, so endpoints need not pass it on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from dataclasses import dataclass

from weft.api_keys import MOST_URGENT, ApiKey
from weft.errors import Unauthenticated
from weft_services.gateway.access.keyring import Keyring
from weft_services.gateway.access.limiter import RateLimiter, RateLimitState


@dataclass(frozen=True, slots=True)
class Principal:
    """A client with its key, or an anonymous one if the mesh requires no keys.

    - `shares_capacity`: several tenants exist, so it must leave capacity for the others.
    - `is_proxied`: a trusted proxy authenticated the client, so the peer address is the proxy's.
    - `current`: returns the present state of a key, None if it was revoked.
    """

    key: ApiKey | None = None
    limiter: RateLimiter | None = None
    shares_capacity: bool = False
    is_proxied: bool = False
    current: Callable[[ApiKey], ApiKey | None] = lambda key: key

    @property
    def name(self) -> str:
        """The key's name for the access log, empty without a key."""
        return self.key.name if self.key else ""

    @property
    def tenant(self) -> str:
        """The key's owner, empty without a key."""
        return self.key.owner if self.key else ""

    @property
    def cache_salt(self) -> bytes:
        """Salt of prefix cache keys. Without API keys all clients share one cache."""
        return self.key.cache_salt if self.key else b""

    @property
    def min_priority(self) -> int:
        """The lowest priority value that the key may use; lower runs sooner."""
        return self.key.priority if self.key else MOST_URGENT

    @property
    def is_operator(self) -> bool:
        """True if the client may see and control the mesh. Without API keys every client may."""
        return self.key is None or self.key.operator

    def may_use(self, model: str) -> bool:
        return self.key is None or self.key.may_use(model)

    @property
    def has_limits(self) -> bool:
        """True if the key has a request or token limit."""
        return self.key is not None and bool(self.key.requests_per_minute or self.key.tokens_per_minute)

    def levels(self) -> list[RateLimitState]:
        """The state of each of its limits; empty if it has none."""
        return self.limiter.levels(self.key) if self.key and self.limiter else []

    def check_quota(self) -> None:
        """Raise RateLimited if the local count already exceeds a limit. Runs before any work."""
        if self.key and self.limiter:
            self.limiter.check(self.key)

    async def take_quota(self, tokens: int) -> None:
        """Charge one request with a prompt of `tokens`. Raises RateLimited; the request counts even then."""
        if self.key and self.limiter:
            await self.limiter.take(self.key, tokens)

    @property
    def is_revoked(self) -> bool:
        """True if the key no longer exists. A key with changed permissions is not revoked."""
        return self.key is not None and self.current(self.key) is None

    def check_key(self) -> None:
        """Raise Unauthenticated if the key was revoked or changed. For endless responses."""
        if self.key is not None and self.current(self.key) != self.key:
            raise Unauthenticated("this API key was revoked or changed")

    def charge(self, requests: int = 0, tokens: int = 0) -> None:
        """Charge without a check: generated tokens and rejected requests."""
        if self.key and self.limiter and (requests or tokens):
            self.limiter.charge(self.key, requests, tokens)


current_principal: ContextVar[Principal] = ContextVar("current_principal", default=Principal())  # noqa: B039 it is frozen


class Authenticator:
    """Keyring and rate limiter, for the life of the process."""

    def __init__(self, keys: str, redis_url: str, is_open: bool = False) -> None:
        """`keys` is a file or a Valkey URL; empty disables authentication.

        `is_open`: a proxy in front of the gateway authenticates clients.
        """
        self._keyring = Keyring(keys) if keys else None
        self._limiter = RateLimiter(redis_url if keys else "")
        self._is_open = is_open

    async def open(self) -> None:
        """Read the keys. Raises ConfigError for a file that cannot be read."""
        if self._keyring is not None:
            await self._keyring.open()

    async def run(self, keys_changed: Callable[[], None]) -> None:
        """Keep keys and limits up to date until cancelled."""
        if self._keyring is None:
            return
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._keyring.run(keys_changed), name="keys")
                group.create_task(self._limiter.run(), name="limits")
        finally:
            await self._keyring.close()

    def authenticate(self, headers: Iterable[tuple[str | bytes, str | bytes]]) -> Principal:
        """Return the principal of these headers.

        Raises Unauthenticated, or PeerLost if no keys could be read yet.
        """
        if self._keyring is None:
            return Principal(is_proxied=self._is_open)
        keyring = self._keyring
        return Principal(keyring.find(headers), self._limiter, keyring.has_tenants, current=keyring.current)
