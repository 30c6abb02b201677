"""What a model's requests are promised, and whether a placement can keep it. Pure; knows predictions, not workers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from weft.config import ConfigError
from weft.errors import Overloaded
from weft.request import WorkerRole
from weft_services.scheduler.crowd import Crowd
from weft_services.scheduler.refusals import MIN_RETRY_SECONDS, Full, clamp_retry
from weft_services.scheduler.state import INFINITE, Placement, Priority, RouteQuery

# work that nobody waits for leaves this share of the promised time to the others
BATCH_SHARE = 0.5
# The default target. With the wait for room (WEFT_QUEUE_SECONDS) and its own prompt, a request has its first token
# within 2 to 3 s. Goodput is the same from 1 to 1.5 s, and less with longer waits (loadtest.fleet overload).
DEFAULT_WAIT_SECONDS = 1.0
# A small or slow fleet finishes a burst of this size, and this many clients that ask one request after the other never
# add up to more. On a fast fleet it takes less than DEFAULT_WAIT_SECONDS.
DEFAULT_BURST_PROMPTS = 32
# A fleet that keeps up with its load works off longer bursts as well. More than this is no use to anyone.
DEFAULT_BURST_SECONDS = 8.0


@dataclass(frozen=True, slots=True)
class Target:
    """Seconds that a prompt may wait before it is computed, and between two tokens; 0: no promise. With a crowd below
    `burst_prompts` a prompt may wait longer, and on a fleet that keeps up with its load for `burst_seconds`."""

    wait_seconds: float = 0.0
    itl_seconds: float = 0.0
    burst_prompts: int = 0
    burst_seconds: float = 0.0

    def allows(self, wait_seconds: float, crowd: Crowd, share: float) -> bool:
        """May a prompt wait so long for a burst to pass."""
        is_short = crowd.keeps_up and wait_seconds <= share * self.burst_seconds
        return is_short or crowd.size < share * self.burst_prompts


DEFAULT_TARGET = Target(DEFAULT_WAIT_SECONDS, burst_prompts=DEFAULT_BURST_PROMPTS, burst_seconds=DEFAULT_BURST_SECONDS)


class OverTarget(Full):
    """There is room, but the request would wait longer than promised, or slow down others too much. `late_seconds`: by
    how much its wait is over the target."""

    def __init__(self, message: str, retry_after_seconds: float, role: WorkerRole, late_seconds: float = 0.0) -> None:
        super().__init__(message, retry_after_seconds, role)
        self.late_seconds = late_seconds


def _endless_crowd() -> Crowd:
    return Crowd(INFINITE)


@dataclass(frozen=True, slots=True)
class Targets:
    """By model; `usual` for the others."""

    usual: Target = DEFAULT_TARGET
    by_model: Mapping[str, Target] = field(default_factory=dict)

    def check(
        self, model: str, priority: Priority, placement: Placement, crowd: Callable[[], Crowd] = _endless_crowd
    ) -> None:
        """Raises OverTarget when the request would wait too long there, or make all others there too slow.

        What computing the prompt itself takes is not counted: a long prompt is no reason to refuse it, also not when
        idle. `crowd`: what competes with the request. Refused clients come back as well, so Retry-After counts them.
        """
        target = self.by_model.get(model, self.usual)
        share = BATCH_SHARE if priority is Priority.BATCH else 1.0
        limit = share * target.wait_seconds
        if target.wait_seconds and placement.wait_seconds > limit:
            before = crowd()
            if not target.allows(placement.wait_seconds, before, share):
                again = clamp_retry(before.seconds(placement.wait_seconds) - limit)
                raise OverTarget(
                    "too many prompts wait already", again, WorkerRole.PREFILL, placement.wait_seconds - limit
                )
        is_shared = placement.decode.booked.requests > 0
        if target.itl_seconds and is_shared and placement.itl_seconds > share * target.itl_seconds:
            raise OverTarget("too many answers are being generated already", MIN_RETRY_SECONDS, WorkerRole.DECODE)


DEFAULT_TARGETS = Targets()
NO_TARGETS = Targets(Target())


class TooLate(Overloaded):
    """There is room, but the answer would not be complete by its deadline. Waiting makes it later still."""


def check_deadline(query: RouteQuery, placement: Placement) -> None:
    """Raises TooLate where the answer, as long as answers are, would take longer than its client waits.

    On an idle worker it takes what it takes: no other time is a better one to ask. An answer that has begun goes on:
    its client has the first part, and what is left of it may be less than usual.
    """
    output = placement.decode_tokens - query.prompt_tokens
    late = placement.ttft_seconds + output * placement.itl_seconds - query.remaining_seconds
    if late <= 0 or query.resumed_tokens:
        return
    if any(worker.booked.requests for worker in (placement.decode, placement.prefill or placement.decode)):
        raise TooLate("the answer would not be complete by its deadline", clamp_retry(late))


def parse_targets(text: str) -> Targets:
    """`2000/50` (milliseconds of waiting, and between tokens) for all models, `name=2000/50,...` for some. 0: no
    promise. Models that are not named keep DEFAULT_TARGET."""
    usual, by_model = DEFAULT_TARGET, {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, numbers = part.rpartition("=")
        wait, slash, itl = numbers.partition("/")
        if not slash or not wait.isdecimal() or not itl.isdecimal():
            raise ConfigError(
                f"WEFT_TARGETS={text!r}: expected WAIT_MS/ITL_MS or MODEL=WAIT_MS/ITL_MS, in a list by commas"
            )
        target = Target(int(wait) / 1000, int(itl) / 1000)
        if name:
            by_model[name] = target
        else:
            usual = target
    return Targets(usual, by_model)
