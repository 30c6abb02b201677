"""A worker that has given back its memory: joined and never able, until somebody wakes it. Knows no engine."""

from __future__ import annotations

import ctypes
import gc
import logging
from dataclasses import dataclass

import torch

from weft.asyncio_compat import background
from weft.engine.messages import EngineLoad
from weft.rpc.server import until_signal
from weft.worker.fleet_client import Introduction, Membership

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Parked:
    """As it last introduced itself; not `is_asleep` when it was woken while it finished what it had."""

    introduction: Introduction
    is_asleep: bool


def give_back() -> None:
    """What nobody refers to any more goes to the device and the system, and not to this process' next use of it."""
    gc.collect()
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)


async def sleep(schedulers: str, parked: Parked) -> Introduction | None:
    """Until it is woken, as what it was asked to be meanwhile; None for a signal that ends the process."""
    if not parked.is_asleep:
        return parked.introduction
    membership = Membership(schedulers, parked.introduction, EngineLoad, lambda: False, is_parked=True)
    logger.info("parked: weights and pool are given back")
    async with background() as tasks:
        tasks.create_task(membership.keep())
        is_ending = await until_signal(or_when=membership.until_park_changes)
        return None if is_ending else membership.introduction
