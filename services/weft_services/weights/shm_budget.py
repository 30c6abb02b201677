"""Shared memory budget for the images of several models: evicts the least recently requested unused image first.

An image is in use while a process maps it, and for HAND_OVER_SECONDS after a request, so that the caller can map it.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Protocol

from weft.capacity.host_limits import available_bytes
from weft.errors import Overloaded
from weft.weights.image import SHARED_MEMORY, Image, is_mapped, remove_abandoned
from weft.weights.load import free_bytes

logger = logging.getLogger(__name__)
HAND_OVER_SECONDS = 30.0
WAIT_SECONDS = 60.0
LOOK_SECONDS = 0.5


class ImageHolder(Protocol):
    """Holder of at most one model's image."""

    @property
    def name(self) -> str:
        """Name of the model, for messages."""

    @property
    def image(self) -> Image | None:
        """The image held now, if any."""

    @property
    def read_bytes(self) -> int:
        """Bytes of the image under construction that already occupy shared memory."""

    def drop(self) -> None:
        """Forget the image; the caller releases it."""


class ShmBudget:
    """Keeps the total size of the holders' images within `limit_bytes`; 0: no limit."""

    def __init__(self, limit_bytes: int = 0, clock: Callable[[], float] = time.monotonic) -> None:
        """Use `clock` for the times of requests."""
        self._limit = limit_bytes
        self._clock = clock
        self._asked_at: dict[ImageHolder, float] = {}
        self._promised: dict[ImageHolder, int] = {}

    def register(self, holder: ImageHolder) -> None:
        """Add a holder; its image counts as never requested."""
        self._asked_at[holder] = -math.inf

    def touch(self, holder: ImageHolder) -> None:
        """Record a request for the holder's image."""
        self._asked_at[holder] = self._clock()

    async def fits(self, size: int, is_there: bool = False) -> bool:
        """Return whether `size` bytes fit; removes only images that no service holds.

        is_there: the image already occupies its memory. Raises Overloaded if the size alone exceeds the limit.
        """
        if 0 < self._limit < size:
            raise Overloaded(f"an image of {size} bytes is by itself larger than WEFT_WEIGHTS_SHM_BYTES={self._limit}")
        while True:
            held, promised = sum(image.size_bytes for _, image in self._held()), sum(self._promised.values())
            if self._limit and held + promised + size > self._limit:
                return False
            # Bytes that other loads have written are no longer free.
            unread = sum(max(0, own - each.read_bytes) for each, own in self._promised.items())
            if is_there or _free_bytes() >= size + unread:
                return True
            if not (name := await asyncio.to_thread(remove_abandoned)):
                return False
            logger.info("evicted unheld image image=%s", name)

    async def admit(self, size: int) -> None:
        """Admit an existing, unheld image; evicts other images if the total exceeds the limit.

        Raises Overloaded if the size alone exceeds the limit.
        """
        while not await self.fits(size, is_there=True) and await self._evict():
            pass

    @asynccontextmanager
    async def reserve(self, holder: ImageHolder, size: int) -> AsyncIterator[None]:
        """Reserve `size` bytes for the holder's image. Raises Overloaded if there is no room within WAIT_SECONDS."""
        await self._make_room(holder, size)
        self._promised[holder] = size  # no await since the check
        try:
            yield
        finally:
            del self._promised[holder]

    async def _make_room(self, holder: ImageHolder, size: int) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + WAIT_SECONDS
        while not await self.fits(size):
            if await self._evict():
                continue
            held = self._held()
            if not (held or self._promised) or loop.time() >= deadline:
                names = ", ".join(f"{each.name!r} {image.size_bytes}" for each, image in held) or "nothing"
                free = f"{free_bytes(SHARED_MEMORY)} free there, {available_bytes()} of memory"
                what = f"no room in {SHARED_MEMORY} for the {size} bytes of {holder.name!r}: {free}"
                raise Overloaded(f"{what}; held: {names}")
            await asyncio.sleep(LOOK_SECONDS)

    def _held(self) -> list[tuple[ImageHolder, Image]]:
        """Return the held images, the least recently requested first."""
        holders = sorted(self._asked_at, key=self._asked_at.__getitem__)
        return [(holder, image) for holder in holders if (image := holder.image) is not None]

    async def _evict(self) -> bool:
        now = self._clock()
        for holder, image in self._held():
            if now - self._asked_at[holder] >= HAND_OVER_SECONDS and not is_mapped(image.fd):
                logger.info("evicted image model=%r", holder.name)
                holder.drop()
                await asyncio.to_thread(image.release)
                return True
        return False


def _free_bytes() -> int:
    """Return the free shared memory that real memory backs; a control group may have less than the file system."""
    return min(free_bytes(SHARED_MEMORY), available_bytes())
