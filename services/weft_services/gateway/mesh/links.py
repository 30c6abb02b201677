"""The Attach streams of this gateway: one a live decode worker, opened on first use, opened anew after a loss."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
from collections.abc import Iterable

from weft.errors import PeerLost
from weft.request import WorkerAddress
from weft_services.gateway.mesh.delivery import Delivery
from weft_services.gateway.mesh.peers import DecodeLink

logger = logging.getLogger(__name__)


class DecodeLinks:
    """Keyed by boot id, so that a restarted worker gets a stream of its own. The group owns their tasks."""

    def __init__(self, group: asyncio.TaskGroup) -> None:
        self._group = group
        self._links: dict[str, DecodeLink] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._opening: dict[str, asyncio.Lock] = {}
        self._lost = asyncio.Event()
        self._delivery = Delivery()
        self.is_closed = False

    async def get(self, worker: WorkerAddress) -> DecodeLink:
        """The open stream to this boot of the worker. Raises PeerLost when it cannot be reached."""
        boot = worker.boot_id
        link = self._links.get(boot)
        if link is not None and not link.is_closed:
            return link
        if self.is_closed:
            raise PeerLost("the gateway is shutting down")
        async with self._opening.setdefault(boot, asyncio.Lock()):
            link = self._links.get(boot)
            if link is None or link.is_closed:
                link = await self._open(worker)
            return link

    def keep_only(self, boot_ids: Iterable[str]) -> None:
        """Close streams to workers that have left the fleet and owe us nothing any more."""
        alive = set(boot_ids)
        for boot in set(self._links) - alive:
            if self._links[boot].num_sequences == 0:
                self._tasks[boot].cancel()
        for boot in [boot for boot, lock in self._opening.items() if boot not in alive and not lock.locked()]:
            del self._opening[boot]

    def close(self) -> None:
        """End all streams, which cancels what still runs on them, and open no more."""
        self.is_closed = True
        for task in self._tasks.values():
            task.cancel()

    async def until_lost(self, seconds: float) -> None:
        """Until a stream ends, but no longer than this."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._lost.wait()
        self._lost.clear()

    async def _open(self, worker: WorkerAddress) -> DecodeLink:
        link = DecodeLink(worker, self._delivery)
        await link.connect()
        self._links[worker.boot_id] = link
        own_context = (
            contextvars.Context()
        )  # it outlives the request that opened it, and its log lines are not that one's
        self._tasks[worker.boot_id] = self._group.create_task(
            self._run(link), name=f"attach {worker.worker_id}", context=own_context
        )
        return link

    async def _run(self, link: DecodeLink) -> None:
        worker = link.worker
        logger.info("attached worker=%s address=%s boot=%s", worker.worker_id, worker.address, worker.boot_id)
        try:
            await link.run()
        finally:
            logger.info("detached worker=%s boot=%s", worker.worker_id, worker.boot_id)
            self._lost.set()
            if self._links.get(worker.boot_id) is link:
                del self._links[worker.boot_id], self._tasks[worker.boot_id]
