"""A trace scaled to a fleet: users by number of workers, rate by the capacity of its prefill workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from loadtest.fleet.machine import Machine
from loadtest.fleet.simulator import FleetPlan
from loadtest.fleet.trace import BLOCK_TOKENS, Request, enlarge, faster

WORKERS_A_COPY = 8


@dataclass(frozen=True, slots=True)
class Scenario:
    """`load`: prefill seconds of the trace with ideal hits, relative to those that the prefill workers have."""

    num_workers: int
    load: float
    num_requests: int = 12_000

    @property
    def num_prefill(self) -> int:
        """Half of the workers; the best ratio that the Mooncake paper found for this trace was about 1:1."""
        return max(self.num_workers // 2, 1)

    def plan(self, machine: Machine, cache_tokens: int) -> FleetPlan:
        """Return the fleet: half of the workers per role; rejected clients do not return."""
        num_decode = self.num_workers - self.num_prefill
        return FleetPlan(machine, self.num_prefill, num_decode, cache_tokens=cache_tokens, clients_retry=False)

    def requests(self, trace: Sequence[Request], machine: Machine) -> list[Request]:
        """Return the trace at that load."""
        many = enlarge(trace, max(self.num_workers // WORKERS_A_COPY, 1), self.num_requests)
        span = many[-1].at - many[0].at
        return faster(many, self.load * self.num_prefill * span / ideal_seconds(many, machine))


def ideal_seconds(requests: Sequence[Request], machine: Machine) -> float:
    """Return the prefill seconds of the whole trace if every block ever computed is found."""
    seen: set[bytes] = set()
    seconds = 0.0
    for request in requests:
        depth = next((index for index, key in enumerate(request.keys) if key not in seen), len(request.keys))
        cached = min(depth * BLOCK_TOKENS, request.prompt_tokens - 1)
        seconds += machine.prefill(request.prompt_tokens - cached, cached)
        seen.update(request.keys)
    return seconds
