"""What happens in the mesh, told to whoever listens: bounded on both sides, and free while nobody does."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

from weft.errors import Overloaded, PeerLost

MAX_LISTENERS = 64
MAX_UNREAD = 64
ItemT = TypeVar("ItemT")


class Subscription(Generic[ItemT]):
    """One listener's unread items; of too many the oldest are lost, since newer ones say more."""

    def __init__(self) -> None:
        self._items: asyncio.Queue[ItemT | None] = asyncio.Queue(MAX_UNREAD)

    def put(self, item: ItemT | None) -> None:
        """Never waits."""
        if self._items.full():
            self._items.get_nowait()
        self._items.put_nowait(item)

    async def next(self) -> ItemT | None:
        """The next item; None when no more will come."""
        return await self._items.get()


class News(Generic[ItemT]):
    """Every item goes to every listener."""

    def __init__(self) -> None:
        self._listeners: set[Subscription[ItemT]] = set()
        self._is_closed = False

    @property
    def has_listeners(self) -> bool:
        """Does anybody."""
        return bool(self._listeners)

    def publish(self, item: ItemT) -> None:
        """Tell all."""
        for listener in self._listeners:
            listener.put(item)

    @contextmanager
    def subscribed(self) -> Iterator[Subscription[ItemT]]:
        """Listen inside the block. Raises Overloaded, or PeerLost once closed."""
        if self._is_closed:
            raise PeerLost("the gateway is shutting down")
        if len(self._listeners) >= MAX_LISTENERS:
            raise Overloaded(f"{MAX_LISTENERS} listeners are here already")
        listener = Subscription[ItemT]()
        self._listeners.add(listener)
        try:
            yield listener
        finally:
            self._listeners.discard(listener)

    def close(self) -> None:
        """No more will come."""
        self._is_closed = True
        for listener in self._listeners:
            listener.put(None)
