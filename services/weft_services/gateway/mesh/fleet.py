"""The fleet as the scheduler last described it: are we ready, and what do prompts have to look like."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from weft.errors import WeftError
from weft.request import WorkerRole
from weft_services.gateway.mesh.peers import Scheduler
from weft_services.gateway.mesh.placement import Worker

logger = logging.getLogger(__name__)

POLL_INTERVAL_SECONDS = 1.0
UNREACHABLE = "the scheduler cannot be reached"


@dataclass(frozen=True, slots=True)
class Fleet:
    """One answer of the scheduler, or none. `trouble` says why there is none."""

    workers: tuple[Worker, ...] = ()
    trouble: str | None = "the scheduler has not been asked yet"

    @property
    def reasons(self) -> list[str]:
        """Why requests cannot be served now; empty when they can."""
        if self.trouble is not None:
            return [self.trouble]
        missing = []
        for role in (WorkerRole.DECODE, WorkerRole.PREFILL):
            able = [worker for worker in self.workers if worker.role.can(role)]
            if not able:
                missing.append(f"no {role} worker has joined")
            elif not any(worker.is_ready for worker in able):
                missing.append(f"no {role} worker is ready")
        return missing

    @property
    def block_tokens(self) -> int | None:
        """Tokens per KV block; None while nobody has joined."""
        return next((worker.block_tokens for worker in self.workers if worker.block_tokens), None)

    @property
    def max_context_tokens(self) -> int | None:
        """What the smallest worker can hold; None while nobody has joined."""
        return min((worker.max_context_tokens for worker in self.workers if worker.max_context_tokens), default=None)

    @property
    def fingerprint(self) -> str | None:
        """OpenAI's system_fingerprint: changes with the weights."""
        return next((f"fp_{worker.weights_hash[:12]}" for worker in self.workers if worker.weights_hash), None)


@dataclass(slots=True)
class FleetWatch:
    """Polls the scheduler; `fleet` is the latest picture. After a lost poll the last workers stay, for their limits."""

    scheduler: Scheduler
    model: str
    fleet: Fleet = field(default_factory=Fleet)

    async def poll(self) -> None:
        """Ask once. Never raises."""
        try:
            workers = await self.scheduler.workers()
        except (WeftError, KeyError) as error:
            if self.fleet.trouble != UNREACHABLE:
                logger.warning("%s: %s", UNREACHABLE, error)
            fleet = Fleet(self.fleet.workers, UNREACHABLE)
        else:
            fleet = Fleet(tuple(worker for worker in workers if worker.model == self.model), None)
        if fleet.reasons != self.fleet.reasons:
            logger.info("ready=%s reasons=%s", not fleet.reasons, "; ".join(fleet.reasons) or "none")
        self.fleet = fleet
