"""Tells the scheduler how far requests have come: batched, in the background, each attempt ended exactly once."""

from __future__ import annotations

import asyncio
import logging
from collections import deque

from weft.errors import InvalidRequest, WeftError
from weft.request import RequestKey
from weft.request_stage import RequestStage
from weft_services.gateway.mesh.scheduler_client import SchedulerClient
from weft_services.gateway.mesh.scheduler_types import Settlement

logger = logging.getLogger(__name__)

MAX_BATCH = 1024
MAX_PENDING = 65_536
RETRY_SECONDS = 0.5
# what is settled meanwhile travels together: a call for each short request is a third of what that costs the scheduler
BATCH_DELAY_SECONDS = 0.02
FIRST_TOKEN = "first_token"


class SettlementQueue:
    """A bounded outbox. Settlements are idempotent, so a batch is repeated until the scheduler has taken it."""

    def __init__(self, scheduler: SchedulerClient) -> None:
        self._scheduler = scheduler
        self._pending: deque[Settlement] = deque(maxlen=MAX_PENDING)  # a scheduler away for so long has forgotten us
        self._filled = asyncio.Event()

    def put(self, settlement: Settlement) -> None:
        """Queue one; never blocks."""
        self._pending.append(settlement)
        self._filled.set()

    async def run(self) -> None:
        """Send for ever."""
        while True:
            await self._filled.wait()
            self._filled.clear()
            while self._pending:
                if not await self._send_batch():
                    await asyncio.sleep(RETRY_SECONDS)
            await asyncio.sleep(BATCH_DELAY_SECONDS)

    async def flush(self) -> None:
        """At the end of the process: one last try for everything. `run` must have ended."""
        while self._pending and await self._send_batch():
            pass

    async def _send_batch(self) -> bool:
        batch = [self._pending.popleft() for _ in range(min(len(self._pending), MAX_BATCH))]
        try:
            await self._scheduler.settle(batch)
        except InvalidRequest as error:  # of another version; it would say so for ever
            logger.error(
                "settlements lost, the scheduler does not understand them: count=%d error=%s", len(batch), error
            )
        except (WeftError, asyncio.CancelledError) as error:
            self._pending.extendleft(reversed(batch))
            if isinstance(error, asyncio.CancelledError):
                raise
            logger.warning("settle failed, will repeat: pending=%d error=%s", len(self._pending), error)
            return False
        return True


class PlacementReservation:
    """What the scheduler has booked for one attempt, given back exactly once."""

    def __init__(self, key: RequestKey, settler: SettlementQueue) -> None:
        self.key = key
        self._settler = settler
        self._has_first_token = False
        self._is_closed = False

    def first_token(self, failed_worker_id: str = "") -> None:
        """The prompt is computed; not by the worker that is named here, although it was asked: of one that was lost
        after its first token that is said later."""
        if not self._is_closed and (failed_worker_id or not self._has_first_token):
            self._has_first_token = True
            self._settler.put(Settlement(self.key, FIRST_TOKEN, failed_worker_id))

    def close(self, stage: RequestStage, failed_worker_id: str = "", generated_tokens: int | None = None) -> None:
        """Finished, with so many tokens, failed or cancelled; later calls change nothing."""
        assert stage.is_terminal
        if not self._is_closed:
            self._is_closed = True
            self._settler.put(Settlement(self.key, stage.value, failed_worker_id, generated_tokens))
