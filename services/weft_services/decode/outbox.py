"""Frames on their way to one gateway, never more than a bound: a gateway that reads too slowly is cut off."""

from __future__ import annotations

import asyncio
from typing import Generic, TypeVar

from weft.errors import Overloaded

ItemT = TypeVar("ItemT")


class Outbox(Generic[ItemT]):
    """`put` never waits; `until_overflow` tells the owner that the reader has fallen behind for good."""

    def __init__(self, max_frames: int) -> None:
        self._frames: asyncio.Queue[list[ItemT]] = asyncio.Queue(max_frames)
        self._has_overflown = asyncio.Event()

    def put(self, frame: list[ItemT]) -> None:
        """Behind the others; thrown away once there are too many."""
        try:
            self._frames.put_nowait(frame)
        except asyncio.QueueFull:
            self._has_overflown.set()

    async def get(self) -> list[ItemT]:
        """The next frame."""
        return await self._frames.get()

    async def until_overflow(self) -> None:
        """Raises Overloaded when a frame was thrown away; never returns."""
        await self._has_overflown.wait()
        raise Overloaded("the gateway reads its stream too slowly")
