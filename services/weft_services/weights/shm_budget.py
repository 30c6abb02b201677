"""Room in shared memory for the images of several models: what was asked for least recently goes first, nothing in use.

An image is in use while a process maps it, and for a while after it was handed out, until whoever asked has mapped it.
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
from weft.weights.image_writer import free_bytes

logger = logging.getLogger(__name__)
HAND_OVER_SECONDS = 30.0
WAIT_SECONDS = 60.0
LOOK_SECONDS = 0.5


class ImageHolder(Protocol):
    """Has a model's image, or has not."""

    @property
    def name(self) -> str:
        """The model's, in messages."""

    @property
    def image(self) -> Image | None:
        """What is held now."""

    @property
    def read_bytes(self) -> int:
        """Of what is being made: so much lies in shared memory by now."""

    def drop(self) -> None:
        """Hold it no more; whoever calls releases it."""


class ShmBudget:
    """What the holders' images take together stays within `limit_bytes`; 0: as much as there is."""

    def __init__(self, limit_bytes: int = 0, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` tells when an image was asked for."""
        self._limit = limit_bytes
        self._clock = clock
        self._asked_at: dict[ImageHolder, float] = {}
        self._promised: dict[ImageHolder, int] = {}

    def register(self, holder: ImageHolder) -> None:
        """One more, whose image has never been asked for."""
        self._asked_at[holder] = -math.inf

    def touch(self, holder: ImageHolder) -> None:
        """Its image has been asked for."""
        self._asked_at[holder] = self._clock()

    async def fits(self, size: int, is_there: bool = False) -> bool:
        """As it is, without what no service holds; `is_there`: it takes its memory already. Raises Overloaded for what
        is more than the limit by itself."""
        if 0 < self._limit < size:
            raise Overloaded(f"an image of {size} bytes is by itself larger than WEFT_WEIGHTS_SHM_BYTES={self._limit}")
        while True:
            held, promised = sum(image.size_bytes for _, image in self._held()), sum(self._promised.values())
            if self._limit and held + promised + size > self._limit:
                return False
            # what others have read of theirs is not free any more
            unread = sum(max(0, own - each.read_bytes) for each, own in self._promised.items())
            if is_there or _free_bytes() >= size + unread:
                return True
            if not (name := await asyncio.to_thread(remove_abandoned)):
                return False
            logger.info("making room: %s goes, which no service holds", name)

    async def admit(self, size: int) -> None:
        """An image that is there already and nobody's: what may go for it goes, where it is too much with the others.
        Raises Overloaded for what is more than the limit by itself."""
        while not await self.fits(size, is_there=True) and await self._evict():
            pass

    @asynccontextmanager
    async def reserve(self, holder: ImageHolder, size: int) -> AsyncIterator[None]:
        """So many bytes for its image. Raises Overloaded when there is no room within WAIT_SECONDS."""
        await self._make_room(holder, size)
        self._promised[holder] = size  # nothing has happened since it was found to fit
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
        """The least recently asked for first."""
        holders = sorted(self._asked_at, key=self._asked_at.__getitem__)
        return [(holder, image) for holder in holders if (image := holder.image) is not None]

    async def _evict(self) -> bool:
        now = self._clock()
        for holder, image in self._held():
            if now - self._asked_at[holder] >= HAND_OVER_SECONDS and not is_mapped(image.fd):
                logger.info("making room: the image of %r goes", holder.name)
                holder.drop()
                await asyncio.to_thread(image.release)
                return True
        return False


def _free_bytes() -> int:
    """Of shared memory, as far as there is memory behind it: a control group may have less than the file system."""
    return min(free_bytes(SHARED_MEMORY), available_bytes())
