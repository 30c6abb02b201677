"""Reports to the scheduler, in the background and in batches, how far attempts have come.

Each attempt ends exactly once.
"""

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
# Collects settlements for one call: a call per short request costs the scheduler three times as much.
BATCH_DELAY_SECONDS = 0.02
FIRST_TOKEN = "first_token"


class SettlementQueue:
    """Bounded queue of settlements. They are idempotent, so a batch is repeated until the scheduler accepts it."""

    def __init__(self, scheduler: SchedulerClient) -> None:
        self._scheduler = scheduler
        # When full, the scheduler was away so long that it has forgotten this gateway.
        self._pending: deque[Settlement] = deque(maxlen=MAX_PENDING)
        self._filled = asyncio.Event()

    def put(self, settlement: Settlement) -> None:
        """Queue a settlement without blocking."""
        self._pending.append(settlement)
        self._filled.set()

    async def run(self) -> None:
        """Send settlements in batches until cancelled."""
        while True:
            await self._filled.wait()
            self._filled.clear()
            while self._pending:
                if not await self._send_batch():
                    await asyncio.sleep(RETRY_SECONDS)
            await asyncio.sleep(BATCH_DELAY_SECONDS)

    async def flush(self) -> None:
        """Try once to send everything, at shutdown. `run` must have ended."""
        while self._pending and await self._send_batch():
            pass

    async def _send_batch(self) -> bool:
        batch = [self._pending.popleft() for _ in range(min(len(self._pending), MAX_BATCH))]
        try:
            await self._scheduler.settle(batch)
        except InvalidRequest as error:  # The scheduler has another version, so a repetition would fail too.
            logger.error("settlements lost, scheduler rejects them count=%d error=%s", len(batch), error)
        except (WeftError, asyncio.CancelledError) as error:
            self._pending.extendleft(reversed(batch))
            if isinstance(error, asyncio.CancelledError):
                raise
            logger.warning("settle failed, will repeat pending=%d error=%s", len(self._pending), error)
            return False
        return True


class PlacementReservation:
    """What the scheduler holds for one attempt; released exactly once."""

    def __init__(self, key: RequestKey, settlements: SettlementQueue) -> None:
        self.key = key
        self._settlements = settlements
        self._has_first_token = False
        self._is_closed = False

    def first_token(self, failed_worker_id: str = "") -> None:
        """Report that the prompt is computed.

        `failed_worker_id`: a prefill worker that was asked but did not compute the prompt. If it was lost after the
        first token, this is reported a second time with its id.
        """
        if not self._is_closed and (failed_worker_id or not self._has_first_token):
            self._has_first_token = True
            self._settlements.put(Settlement(self.key, FIRST_TOKEN, failed_worker_id))

    def close(self, stage: RequestStage, failed_worker_id: str = "", generated_tokens: int | None = None) -> None:
        """Report the end of the attempt; later calls do nothing. `generated_tokens` goes with `Stage.FINISHED`."""
        assert stage.is_terminal
        if not self._is_closed:
            self._is_closed = True
            self._settlements.put(Settlement(self.key, stage.value, failed_worker_id, generated_tokens))
