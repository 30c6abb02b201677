"""The Attach streams of this gateway: one a live decode worker, opened on first use, opened anew after a loss."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
from collections.abc import Iterable

from weft.errors import PeerLost
from weft.request import WorkerAddress
from weft_services.gateway.mesh.decode_peers import DecodeLink
from weft_services.gateway.mesh.delivery import Delivery

logger = logging.getLogger(__name__)


class DecodeLinks:
    """Keyed by boot id, so that a restarted worker gets a stream of its own. The group owns their tasks."""

    def __init__(self, group: asyncio.TaskGroup) -> None:
        self._group = group
        self._links: dict[str, DecodeLink] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._attached = set[DecodeLink]()  # whose task has begun: until then a cancelled one would not end its link
        self._opening: dict[str, asyncio.Task[DecodeLink | PeerLost]] = {}
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
        # who comes while a peer is called shares the outcome: one after the other they would wait for a frozen one each
        if (opening := self._opening.get(boot)) is None:
            opening = self._opening[boot] = self._begin_opening(worker)
        await asyncio.wait((opening,))
        if opening.cancelled():
            raise PeerLost("the gateway is shutting down")
        outcome = opening.result()
        if isinstance(outcome, PeerLost):
            raise PeerLost(str(outcome), outcome.worker_id)
        return outcome

    def keep_only(self, boot_ids: Iterable[str]) -> None:
        """Close streams to workers that have left the fleet and owe us nothing any more."""
        alive = set(boot_ids)
        for boot, link in self._links.items():
            if boot not in alive and link in self._attached and link.num_sequences == 0:
                self._tasks[boot].cancel()

    def close(self) -> None:
        """End all streams, which cancels what still runs on them, and open no more."""
        self.is_closed = True
        for task in (*self._opening.values(), *self._tasks.values()):
            task.cancel()

    async def until_lost(self, seconds: float) -> None:
        """Until a stream ends, but no longer than this."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._lost.wait()
        self._lost.clear()

    def _begin_opening(self, worker: WorkerAddress) -> asyncio.Task[DecodeLink | PeerLost]:
        # it outlives the request that began it, as the stream does, and their log lines are not that one's
        task = self._group.create_task(
            self._open(worker), name=f"open {worker.worker_id}", context=contextvars.Context()
        )
        task.add_done_callback(lambda _: self._opening.pop(worker.boot_id, None))
        return task

    async def _open(self, worker: WorkerAddress) -> DecodeLink | PeerLost:
        link = DecodeLink(worker, self._delivery)
        try:
            await link.connect()
        except PeerLost as error:
            return error
        self._links[worker.boot_id] = link
        self._tasks[worker.boot_id] = self._group.create_task(self._run(link), name=f"attach {worker.worker_id}")
        return link

    async def _run(self, link: DecodeLink) -> None:
        worker = link.worker
        logger.info("attached worker=%s address=%s boot=%s", worker.worker_id, worker.address, worker.boot_id)
        self._attached.add(link)
        try:
            await link.run()
        finally:
            self._attached.discard(link)
            logger.info("detached worker=%s boot=%s", worker.worker_id, worker.boot_id)
            self._lost.set()
            if self._links.get(worker.boot_id) is link:
                del self._links[worker.boot_id], self._tasks[worker.boot_id]
