"""Decides which worker should change its role, and which scheduler may decide it.

Prefill is short if a new prompt would wait longer than the limit. Decode is short if tokens come slower than the limit
or its pools are nearly full. A pressure of 1 is at the limit. A worker moves if one role was short for
MIN_SHORTAGE_SECONDS and the other one, without it, stays well below its limit. If both are short no move helps.

Per model one worker moves at a time, with a pause, and each role keeps `least` workers. Workers that take no requests
neither count nor move.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import fmean

from weft.errors import ConfigError
from weft.request import WorkerRole, new_id
from weft.rpc.valkey import DEADLINE_SECONDS, Valkey
from weft_services.scheduler.fleet_state import INFINITE, NEVER, ModelWorkers, Worker

# A role is short if it was over its limit this much longer than below. Queues fluctuate, and one empty or long queue
# must not undo all other observations.
MIN_SHORTAGE_SECONDS = 5.0
# the role that gives a worker must stay below this share of its limit
SPARE_PRESSURE = 0.75
# share of a pool that counts as full
FULL_POOL = 0.9


@dataclass(frozen=True, slots=True)
class BalancerLimits:
    """Seconds that prompts may wait and that a token may take, workers that each role keeps, seconds between moves."""

    wait_seconds: float
    itl_seconds: float
    least: int = 1
    pause_seconds: float = 30.0


@dataclass(frozen=True, slots=True)
class RoleChange:
    """A worker that should play another role, and why."""

    worker: Worker
    role: WorkerRole
    reason: str


def prefill_pressure(members: ModelWorkers, limits: BalancerLimits, without: int = 0) -> float:
    """Return the prefill load relative to its limit, with `without` workers fewer."""
    workers = [worker for worker in members.prefills if worker.takes_requests]
    if len(workers) <= without:
        return INFINITE
    share = len(workers) / (len(workers) - without)
    # reported, not reserved: reservations include prompts that wait for room on a decode worker
    waiting = fmean(worker.report.queued_prefill_tokens * worker.token_seconds for worker in workers) * share
    # a short queue does not predict the queue with fewer workers; utilization does
    return max(waiting / limits.wait_seconds, members.utilization * share if without else 0.0)


def decode_pressure(members: ModelWorkers, limits: BalancerLimits, is_prefill_short: bool, without: int = 0) -> float:
    """Return the decode load relative to its limit, with `without` workers fewer.

    Pools also fill up behind a slow prefill; then only the token rate counts.
    """
    workers = [worker for worker in members.decodes if worker.takes_requests]
    if len(workers) <= without:
        return INFINITE
    share = len(workers) / (len(workers) - without)
    batch = fmean(worker.report.num_running for worker in workers) * share
    measured = [worker.speed.itl_seconds(round(batch)) for worker in workers if worker.speed.step is not None]
    itl = fmean(measured) if measured and batch > 0 else 0.0
    pools = fmean(worker.kv_use * (_generating(worker) if is_prefill_short else 1.0) for worker in workers) * share
    return max(itl / limits.itl_seconds, pools / FULL_POOL)


def _generating(worker: Worker) -> float:
    return worker.report.num_running / max(worker.report.num_running + worker.report.num_waiting, 1)


def wanted_change(members: ModelWorkers, limits: BalancerLimits) -> RoleChange | None:
    """Return the move that would help now, if there is one."""
    prefill = prefill_pressure(members, limits)
    decode = decode_pressure(members, limits, prefill > 1)
    if (prefill > 1) == (decode > 1):
        return None
    if prefill > 1:
        role, giver, left = WorkerRole.PREFILL, WorkerRole.DECODE, decode_pressure(members, limits, True, without=1)
    else:
        role, giver, left = WorkerRole.DECODE, WorkerRole.PREFILL, prefill_pressure(members, limits, without=1)
    worker = _movable_worker(members, giver, limits.least)
    if worker is None or left > SPARE_PRESSURE:
        return None
    return RoleChange(worker, role, f"prefill is at {prefill:.1f} of its limit, decode at {decode:.1f}")


def _movable_worker(members: ModelWorkers, role: WorkerRole, least: int) -> Worker | None:
    """Return the least loaded worker of the role that can move, unless the role has only `least`.

    Workers that declined a request come last.
    """
    playing = [worker for worker in members.workers if worker.info.role.can(role) and worker.takes_requests]
    able = [worker for worker in playing if worker.info.role is role and worker.info.can_change_role]
    if len(playing) <= least:
        return None
    return min(able, key=_move_order, default=None)


def _move_order(worker: Worker) -> tuple[int, int, str]:
    return worker.num_declined_roles, worker.prefill_tokens + worker.decode_tokens, worker.worker_id


@dataclass(slots=True)
class _Shortage:
    """Which role of a model is short, and for how much longer than not."""

    looked_at: float
    role: WorkerRole | None = None
    seconds: float = 0.0

    def look(self, role: WorkerRole | None, now: float) -> None:
        """Add an observation; None: neither role is short."""
        passed, self.looked_at = now - self.looked_at, now
        if role is None:
            self.seconds = max(self.seconds - passed, 0.0)
        elif role is self.role:
            self.seconds += passed
        else:
            self.role, self.seconds = role, 0.0


class RoleBalancer:
    """Plans role changes; call once a second. Only the scheduler for which `may_plan` is true plans."""

    def __init__(self, limits: BalancerLimits, may_plan: Callable[[], bool] = lambda: True) -> None:
        self._limits = limits
        self._is_leader = may_plan
        self._short: dict[str, _Shortage] = {}
        self._moved_at: dict[str, float] = {}

    def plan(self, models: Mapping[str, ModelWorkers], now: float) -> list[RoleChange]:
        """Return at most one change per model; the caller requests it."""
        if not self._is_leader():
            # another scheduler moves workers; the one that takes over starts with a pause
            self._short.clear()
            self._moved_at = dict.fromkeys(models, now)
            return []
        self._moved_at = {model: at for model, at in self._moved_at.items() if model in models}
        self._short = {model: shortage for model, shortage in self._short.items() if model in models}
        moves = [self._plan(model, members, now) for model, members in models.items()]
        return [move for move in moves if move is not None]

    def _plan(self, model: str, members: ModelWorkers, now: float) -> RoleChange | None:
        move = wanted_change(members, self._limits)
        shortage = self._short.setdefault(model, _Shortage(now))
        shortage.look(move.role if move is not None else None, now)
        is_moving = any(worker.role_requested is not None for worker in members.workers)
        rests = now - self._moved_at.get(model, NEVER) < self._limits.pause_seconds
        if move is None or is_moving or rests or shortage.seconds < MIN_SHORTAGE_SECONDS:
            return None
        del self._short[model]
        self._moved_at[model] = now
        return move


def parse_limits(text: str) -> BalancerLimits | None:
    """Parse `500/50` (ms of waiting / ms between tokens); empty: no balancer. Raises ConfigError."""
    if not text:
        return None
    wait, slash, itl = text.partition("/")
    if not slash or not wait.isdecimal() or not itl.isdecimal() or not int(wait) or not int(itl):
        raise ConfigError(f"WEFT_ROLE_BALANCER={text!r}: expected WAIT_MS/ITL_MS")
    return BalancerLimits(int(wait) / 1000, int(itl) / 1000)


LEASE_SECONDS = 10.0
# one or two lost renewals are harmless
RENEWALS = 5
# take a free lease, renew our own
TAKE = """
local holder = redis.call('GET', KEYS[1])
if holder and holder ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 1
"""


class LeaderLease:
    """A lease in the Valkey that the schedulers share; at most one holds it, except briefly after Valkey lost its data.

    `run` must be running. Without Valkey the scheduler counts as the only one. While Valkey is unreachable no lease is
    renewed, so soon no scheduler is leader.
    """

    def __init__(
        self,
        url: str,
        name: str,
        seconds: float = LEASE_SECONDS,
        clock: Callable[[], float] = time.monotonic,
        deadline_seconds: float = DEADLINE_SECONDS,
    ) -> None:
        found, lost = f"lease renewed again name={name}", f"lease renewal failed name={name}"
        self._valkey = Valkey(url, found, lost, clock, deadline_seconds) if url else None
        self._take = self._valkey.redis.register_script(TAKE) if self._valkey else None
        self._key = f"weft:lease:{name}"
        self._owner = new_id()
        self._seconds = seconds
        self._clock = clock
        self._held_until = 0.0

    @property
    def is_held(self) -> bool:
        """True while this scheduler holds the lease."""
        return self._valkey is None or self._clock() < self._held_until

    async def run(self) -> None:
        """Take and renew the lease until cancelled."""
        if self._valkey is None:
            return
        try:
            while True:
                await self.renew()
                await asyncio.sleep(self._seconds / RENEWALS)
        finally:
            await self.close()

    async def close(self) -> None:
        """Close the connections; the lease expires by itself."""
        if self._valkey is not None:
            await self._valkey.close()

    async def renew(self) -> None:
        """Take or renew the lease once. It counts from the request, which is earlier than Valkey's time."""
        assert self._valkey is not None
        assert self._take is not None
        take, asked_at = self._take, self._clock()
        taken = await self._valkey.call(lambda redis: take([self._key], [self._owner, round(self._seconds * 1000)]))
        if taken:
            self._held_until = asked_at + self._seconds
        elif taken is not None:
            self._held_until = 0.0
