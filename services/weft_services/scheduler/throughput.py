"""Measured speed of a worker (prefill rate, decode step time, store fetches) and the mean answer length per model.

Values only: no queue and no placement.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

# tokens per second until reports of the worker or its peers say otherwise
DEFAULT_PREFILL_RATE = 2000.0
DEFAULT_DECODE_RATE = 1000.0
DEFAULT_ITL_SECONDS = 0.05
# weight of the newest measurement
NEWEST_SHARE = 0.2
# shorter measurements are ignored
MIN_MEASURE_SECONDS = 0.005
# measurements decay with a time constant of 200 s; the peers' rate counts for PRIOR_SECONDS
DECAY_PER_SECOND = 0.995
PRIOR_SECONDS = 20.0
# Fetch time as a share of compute time, until workers have fetched enough. Disk takes 1.9 times as long as memory
# (docs/results/kv-cache.md: time to first token minus that of a hit in the worker's own pool).
DEFAULT_FETCH_SHARE = 0.25
DISK_RATIO = 1.9
# weight of that prior, in fetched tokens
PRIOR_FETCHED_TOKENS = 8192
# variance of the batch size above which a slope is used
MIN_SPREAD = 0.5


@dataclass(frozen=True, slots=True)
class StoreCredit:
    """Share of the compute time that a cached token saves, 0 to 1: in the store's memory, and on its disk."""

    memory: float = 1.0 - DEFAULT_FETCH_SHARE
    disk: float = 1.0 - DISK_RATIO * DEFAULT_FETCH_SHARE


DEFAULT_STORE_CREDIT = StoreCredit()


@dataclass(slots=True)
class FetchStats:
    """Tokens fetched from one tier of the store and the time it took, with exponential decay."""

    tokens: float = 0.0
    seconds: float = 0.0

    def add(self, tokens: int, seconds: float) -> None:
        """Add a fetch. Ignores counters that restarted and fetches without a time."""
        if tokens > 0 and seconds > 0.0:
            self.tokens += tokens
            self.seconds += seconds

    def fade(self) -> None:
        """Apply the decay of one second."""
        self.tokens *= DECAY_PER_SECOND
        self.seconds *= DECAY_PER_SECOND


def store_credit(memory: Iterable[FetchStats], disk: Iterable[FetchStats], prefill_rate: float) -> StoreCredit:
    """Return the credit that recent fetches show, given the prefill rate in tokens per second."""
    memory_share = _fetch_share(memory, prefill_rate, DEFAULT_FETCH_SHARE)
    disk_share = _fetch_share(disk, prefill_rate, DISK_RATIO * memory_share)
    return StoreCredit(max(1.0 - memory_share, 0.0), max(1.0 - disk_share, 0.0))


def _fetch_share(fetched: Iterable[FetchStats], prefill_rate: float, usual: float) -> float:
    """Return the fetch time as a share of the compute time for the same tokens."""
    tokens, seconds = float(PRIOR_FETCHED_TOKENS), usual * PRIOR_FETCHED_TOKENS / prefill_rate
    for each in fetched:
        tokens += each.tokens
        seconds += each.seconds
    return seconds * prefill_rate / tokens


@dataclass(slots=True)
class WorkerSpeed:
    """Prefill rate, and the decode step time as a linear function of the batch size.

    Long prompts are slower per token, so a few tokens say little. Measurements decay, and the peers' rate counts for
    PRIOR_SECONDS. Otherwise one long prompt would keep all others away and freeze the estimate.
    """

    prompt_tokens: float = 0.0
    prompt_seconds: float = 0.0
    step: StepTimeFit | None = None
    memory: FetchStats = field(default_factory=FetchStats)
    disk: FetchStats = field(default_factory=FetchStats)

    def measure_prefill(self, tokens: int, seconds: float) -> None:
        """Add a measurement of computed prompt tokens."""
        if seconds >= MIN_MEASURE_SECONDS and tokens > 0:
            self.prompt_tokens += tokens
            self.prompt_seconds += seconds

    def fade(self) -> None:
        """Apply the decay of one second."""
        self.prompt_tokens *= DECAY_PER_SECOND
        self.prompt_seconds *= DECAY_PER_SECOND
        self.memory.fade()
        self.disk.fade()

    def prefill_rate(self, usual: float) -> float:
        """Return prompt tokens per second: the measured rate, smoothed with the peers' rate `usual`."""
        return (self.prompt_tokens + PRIOR_SECONDS * usual) / (self.prompt_seconds + PRIOR_SECONDS)

    def measure_decode(self, tokens: int, steps: int, seconds: float) -> None:
        """Add a measurement of decode steps; each sequence gets one token per step."""
        if seconds < MIN_MEASURE_SECONDS or tokens <= 0 or steps <= 0:
            return
        if self.step is None:
            self.step = StepTimeFit()
        self.step.add(tokens / steps, seconds / steps)

    @property
    def decode_rate(self) -> float | None:
        """Tokens per second of one sequence at recent batch sizes."""
        return 1.0 / self.step.mean_seconds if self.step is not None else None

    def itl_seconds(self, num_running: int) -> float:
        """Predict the inter-token latency with that many sequences in the batch."""
        return self.step.at(num_running) if self.step is not None else DEFAULT_ITL_SECONDS


class StepTimeFit:
    """Fit of step seconds = a + b * sequences: least squares with decay; never decreasing, never negative."""

    __slots__ = ("_mean_n", "_num", "_var_n", "_with_n", "mean_seconds")

    def __init__(self) -> None:
        self._num = 0
        self._mean_n = self._var_n = self._with_n = 0.0
        self.mean_seconds = 0.0

    def add(self, n: float, seconds: float) -> None:
        """Add a measured step time at a batch size."""
        self._num += 1
        share = max(NEWEST_SHARE, 1 / self._num)
        dn, ds = n - self._mean_n, seconds - self.mean_seconds
        self._mean_n += share * dn
        self.mean_seconds += share * ds
        self._var_n = (1 - share) * (self._var_n + share * dn * dn)
        self._with_n = (1 - share) * (self._with_n + share * dn * ds)

    def at(self, n: float) -> float:
        """Return the fitted step time at a batch size."""
        slope = max(self._with_n / self._var_n, 0.0) if self._var_n > MIN_SPREAD else 0.0
        return max(self.mean_seconds + slope * (n - self._mean_n), 0.1 * self.mean_seconds)


# before the first answer has ended
DEFAULT_OUTPUT_TOKENS = 256.0
# weight of the newest answer; about the last 100 count
LENGTH_NEWEST_SHARE = 0.02
MAX_LENGTH_MODELS = 1024


class OutputLengths:
    """Mean answer length by model, with exponential decay."""

    def __init__(self) -> None:
        self._means: OrderedDict[str, float] = OrderedDict()

    def record(self, model: str, tokens: int) -> None:
        """Add an answer that ended by itself."""
        if tokens <= 0:
            return
        mean = self._means.get(model, DEFAULT_OUTPUT_TOKENS)
        self._means[model] = mean + LENGTH_NEWEST_SHARE * (tokens - mean)
        self._means.move_to_end(model)
        if len(self._means) > MAX_LENGTH_MODELS:
            self._means.popitem(last=False)

    def expected(self, model: str, max_tokens: int) -> int:
        """Return the expected length of the next answer, at most `max_tokens`."""
        return min(max_tokens, round(self._means.get(model, DEFAULT_OUTPUT_TOKENS)))
