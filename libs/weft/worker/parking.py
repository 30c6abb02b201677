"""Parked state: the worker stays in the fleet without engine, weights or pool, and not ready, until it is woken."""

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
    """The hello to park with. `is_asleep` is False if the worker was woken while it still drained."""

    hello: WorkerHello
    is_asleep: bool


def release_memory() -> None:
    """Return unused memory to the device and the system."""
    gc.collect()
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)


async def run_parked(schedulers: str, parked: ParkedState) -> WorkerHello | None:
    """Stay parked until woken; return the hello to wake with, or None if a signal ends the process."""
    if not parked.is_asleep:
        return parked.hello
    membership = Membership(schedulers, parked.hello, EngineLoad, lambda: False, is_parked=True)
    logger.info("parked, weights and pool released")
    async with background_tasks() as tasks:
        tasks.create_task(membership.run())
        is_ending = await until_signal(or_when=membership.until_park_changes)
        return None if is_ending else membership.hello
