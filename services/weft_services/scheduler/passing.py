"""Who need not wait behind a prompt that fits only on larger workers, and where they may go: to workers that could
never hold it, so that those who go past cannot starve it. Pure; books nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from weft.request import WorkerRole
from weft_services.scheduler.refusals import is_ready
from weft_services.scheduler.served import Served
from weft_services.scheduler.state import INFINITE, RouteQuery, Worker

# prompts that the others go past, each of which takes a look at the fleet
MAX_PASSED = 8


@dataclass(frozen=True, slots=True)
class Passage:
    """What is left to who goes past others: of a role only workers on which so long a prompt does not fit. `longest`:
    the longest prompt that fits on those of them that take requests."""

    below: dict[WorkerRole, float] = field(default_factory=dict)
    longest: float = INFINITE
    num_passed: int = 0

    def admits(self, worker: Worker, role: WorkerRole) -> bool:
        """May it play that role for who goes past."""
        return not self.below or all(
            worker.longest_prompt < tokens for kept, tokens in self.below.items() if role.can(kept)
        )


FREE = Passage()


def past(served: Served, query: RouteQuery, role: WorkerRole, passage: Passage) -> Passage | None:
    """What is left behind this one as well, which finds no room in that role. None: nothing, they wait behind it.

    Where a role has no smaller workers, all take it as room comes, this one first as soon as its own role has some.
    """
    smaller = {
        each: max((worker.longest_prompt for worker in live if _is_smaller(worker, query)), default=0)
        for each, live in ((WorkerRole.PREFILL, served.prefills), (WorkerRole.DECODE, served.decodes))
    }
    if not smaller[role] or passage.num_passed >= MAX_PASSED:
        return None
    apart = {each: tokens for each, tokens in smaller.items() if tokens}
    below = passage.below | dict.fromkeys(apart, query.prompt_tokens)
    return Passage(below, min(apart.values()), passage.num_passed + 1)


def _is_smaller(worker: Worker, query: RouteQuery) -> bool:
    return is_ready(worker) and worker.longest_prompt < query.prompt_tokens
