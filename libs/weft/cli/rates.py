"""Rates out of what workers have counted since their start, by the times at which their reports were made."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from weft_mesh.v1 import scheduler_service_pb2 as pb

# reports and pictures both come once a second, and not together
WINDOW_SECONDS = 2.8
SAME_REPORT_SECONDS = 0.1
KEPT = 30


@dataclass(frozen=True, slots=True)
class Count:
    """A worker's counters at a time."""

    at: float
    prompt_tokens: int
    generated_tokens: int
    hand_offs: dict[str, int]
    hand_off_bytes: int


@dataclass(slots=True)
class Rates:
    """One boot of a worker: its latest counts, and tokens a second over the last half minute."""

    counts: deque[Count] = field(default_factory=deque)
    prompt: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))
    generated: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))
    hand_offs: dict[str, float] = field(default_factory=dict)
    bytes_per_second: float = 0.0

    def take(self, count: Count) -> None:
        """A picture of the fleet has come; its report may be the one before."""
        if not self.counts or count.at - self.counts[-1].at > SAME_REPORT_SECONDS:
            self.counts.append(count)
        while len(self.counts) > 2 and count.at - self.counts[1].at > WINDOW_SECONDS:
            self.counts.popleft()
        first, last = self.counts[0], self.counts[-1]
        seconds = last.at - first.at
        per_second = 1.0 / seconds if seconds > 0 else 0.0
        self.prompt.append((last.prompt_tokens - first.prompt_tokens) * per_second)
        self.generated.append((last.generated_tokens - first.generated_tokens) * per_second)
        self.hand_offs = {
            lender: (num - first.hand_offs.get(lender, 0)) * per_second for lender, num in last.hand_offs.items()
        }
        self.bytes_per_second = (last.hand_off_bytes - first.hand_off_bytes) * per_second


class History:
    """The rates of everyone who is live; `take` every picture with its time."""

    def __init__(self) -> None:
        self._boots: dict[str, Rates] = {}

    def take(self, workers: Iterable[pb.WorkerStatus], now: float) -> None:
        """Workers that have gone are forgotten."""
        boots: dict[str, Rates] = {}
        for worker in workers:
            boot_id, tallies = worker.hello.worker.boot_id, worker.report.hand_offs
            boots[boot_id] = self._boots.get(boot_id) or Rates()
            boots[boot_id].take(
                Count(
                    at=now - worker.report_age_ms / 1000,
                    prompt_tokens=worker.report.computed_prompt_tokens,
                    generated_tokens=worker.report.generated_tokens,
                    hand_offs={tally.prefill_worker_id: tally.num_prompts for tally in tallies},
                    hand_off_bytes=sum(tally.size_bytes for tally in tallies),
                )
            )
        self._boots = boots

    def of(self, worker: pb.WorkerStatus) -> Rates:
        """Of a worker of the latest picture."""
        return self._boots[worker.hello.worker.boot_id]
