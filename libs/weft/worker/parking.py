"""A worker that has given back its memory: joined and never able, until somebody wakes it. Knows no engine."""

from __future__ import annotations

import ctypes
import gc
import logging
from dataclasses import dataclass

import torch

from weft.asyncio_compat import background_tasks
from weft.engine.messages import EngineLoad
from weft.fleet_types import WorkerHello
from weft.rpc.server import until_signal
from weft.worker.fleet_client import Membership

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ParkedState:
    """As it last introduced itself; not `is_asleep` when it was woken while it finished what it had."""

    hello: WorkerHello
    is_asleep: bool


def release_memory() -> None:
    """What nobody refers to any more goes to the device and the system, and not to this process' next use of it."""
    gc.collect()
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)


async def run_parked(schedulers: str, parked: ParkedState) -> WorkerHello | None:
    """Until it is woken, as what it was asked to be meanwhile; None for a signal that ends the process."""
    if not parked.is_asleep:
        return parked.hello
    membership = Membership(schedulers, parked.hello, EngineLoad, lambda: False, is_parked=True)
    logger.info("parked: weights and pool are given back")
    async with background_tasks() as tasks:
        tasks.create_task(membership.run())
        is_ending = await until_signal(or_when=membership.until_park_changes)
        return None if is_ending else membership.hello
