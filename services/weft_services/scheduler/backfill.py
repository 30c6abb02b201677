"""Backfill: shorter prompts use small workers while a longer prompt waits for a larger worker.

A backfilled request may use only workers that the waiting prompt can never use, so it cannot starve it. Pure functions.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from weft.fleet_types import RouteQuery
from weft.request import WorkerRole
from weft_services.scheduler.fleet_state import INFINITE, ModelWorkers, Worker
from weft_services.scheduler.slo import is_ready

# waiting prompts that others may pass; each costs another look at the fleet
MAX_BYPASSED = 8


@dataclass(frozen=True, slots=True)
class BackfillWindow:
    """What a request may use ahead of a waiting one.

    `below_tokens`: by role, only workers on which so long a prompt does not fit. `longest_prompt`: the longest prompt
    that fits on those of them that take requests.
    """

    below_tokens: dict[WorkerRole, float] = field(default_factory=dict)
    longest_prompt: float = INFINITE
    num_bypassed: int = 0

    def admits(self, worker: Worker, role: WorkerRole) -> bool:
        """Return whether the worker may play that role for a backfilled request."""
        return not self.below_tokens or all(
            worker.longest_prompt < tokens for kept, tokens in self.below_tokens.items() if role.can(kept)
        )


UNRESTRICTED = BackfillWindow()


def backfill_window(
    members: ModelWorkers, query: RouteQuery, role: WorkerRole, window: BackfillWindow
) -> BackfillWindow | None:
    """Return what is left behind a request that found no room in `role`; None if the others must wait behind it.

    A role without smaller workers stays open to all. The waiting request goes first there as soon as its own role has
    room.
    """
    smaller = {
        each: max((worker.longest_prompt for worker in live if _is_smaller(worker, query)), default=0)
        for each, live in ((WorkerRole.PREFILL, members.prefills), (WorkerRole.DECODE, members.decodes))
    }
    if not smaller[role] or window.num_bypassed >= MAX_BYPASSED:
        return None
    apart = {each: tokens for each, tokens in smaller.items() if tokens}
    below = window.below_tokens | dict.fromkeys(apart, query.prompt_tokens)
    return BackfillWindow(below, min(apart.values()), window.num_bypassed + 1)


def _is_smaller(worker: Worker, query: RouteQuery) -> bool:
    return is_ready(worker) and worker.longest_prompt < query.prompt_tokens
