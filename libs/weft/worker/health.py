"""What a worker says of its health: to whoever asks the listener, and to the scheduler through the membership."""

from __future__ import annotations

import logging

from weft.errors import EngineFailed
from weft.rpc.server import RpcServer
from weft.worker.vitals import Vitals

logger = logging.getLogger(__name__)


class Health:
    """Ready once joined and as long as there is no trouble."""

    def __init__(self, vitals: Vitals, rpc: RpcServer) -> None:
        self._vitals = vitals
        self._rpc = rpc
        self._has_joined = False
        self._trouble = ""

    @property
    def is_fit(self) -> bool:
        """As of the last check."""
        return not self._trouble

    async def join(self) -> None:
        """The fleet knows us: from now on, requests may come."""
        self._has_joined = True
        await self._tell()

    async def check(self) -> None:
        """To be called on a timer. Raises EngineFailed for an engine that never will move again."""
        if self._vitals.is_lost:
            raise EngineFailed("the engine's thread does not move any more")
        trouble = self._vitals.trouble()
        if bool(trouble) == bool(self._trouble):
            return
        self._trouble = trouble
        logger.warning("not fit for work: %s" if trouble else "fit for work again%s", trouble)
        await self._tell()

    async def _tell(self) -> None:
        await self._rpc.set_ready(self._has_joined and not self._trouble)
