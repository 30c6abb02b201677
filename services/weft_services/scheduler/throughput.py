"""Measured speed of a worker (prefill rate, decode step time, store fetch time) and the mean output length per model.

Values only: neither queue nor placement is read here.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

# tokens a second, until a worker's reports or its peers' say better
DEFAULT_PREFILL_RATE = 2000.0
DEFAULT_DECODE_RATE = 1000.0
DEFAULT_ITL_SECONDS = 0.05
# weight of the newest measurement
NEWEST_SHARE = 0.2
# less work than this measures nothing
MIN_MEASURE_SECONDS = 0.005
# what a worker computed counts for about as many seconds as these, and as many seconds of its peers' speed beside it
DECAY_PER_SECOND = 0.995
PRIOR_SECONDS = 20.0
# a token that the store holds has to be fetched: what that takes of the time in which it would be computed, as long as
# workers have fetched little. From disk it takes 1.9 times as long as from memory (docs/results/kv-cache.md: times to
# the first token, less that of a hit in the worker's own pool)
DEFAULT_FETCH_SHARE = 0.25
DISK_RATIO = 1.9
# fetched tokens that count as much as what is said above
PRIOR_FETCHED_TOKENS = 8192
# spread of batch sizes, in sequences squared, from which a slope means something
MIN_SPREAD = 0.5


@dataclass(frozen=True, slots=True)
class StoreCredit:
    """What a token in the store saves of computing it, 0 to 1: in its memory, and on its disk."""

    memory: float = 1.0 - DEFAULT_FETCH_SHARE
    disk: float = 1.0 - DISK_RATIO * DEFAULT_FETCH_SHARE


DEFAULT_STORE_CREDIT = StoreCredit()


@dataclass(slots=True)
class FetchStats:
    """Tokens that came out of one tier of the store, and the time that took; what lies back fades."""

    tokens: float = 0.0
    seconds: float = 0.0

    def add(self, tokens: int, seconds: float) -> None:
        """So many more; nothing of a worker that counts anew, or does not say how long it took."""
        if tokens > 0 and seconds > 0.0:
            self.tokens += tokens
            self.seconds += seconds

    def fade(self) -> None:
        """A second has passed."""
        self.tokens *= DECAY_PER_SECOND
        self.seconds *= DECAY_PER_SECOND


def store_credit(memory: Iterable[FetchStats], disk: Iterable[FetchStats], prefill_rate: float) -> StoreCredit:
    """From what workers have fetched of late, where they compute so many prompt tokens a second."""
    memory_share = _fetch_share(memory, prefill_rate, DEFAULT_FETCH_SHARE)
    disk_share = _fetch_share(disk, prefill_rate, DISK_RATIO * memory_share)
    return StoreCredit(max(1.0 - memory_share, 0.0), max(1.0 - disk_share, 0.0))


def _fetch_share(fetched: Iterable[FetchStats], prefill_rate: float, usual: float) -> float:
    """What fetching takes of the time in which as much would be computed."""
    tokens, seconds = float(PRIOR_FETCHED_TOKENS), usual * PRIOR_FETCHED_TOKENS / prefill_rate
    for each in fetched:
        tokens += each.tokens
        seconds += each.seconds
    return seconds * prefill_rate / tokens


@dataclass(slots=True)
class WorkerSpeed:
    """Prompt tokens a second, and the time of a step as a straight line over the sequences in it.

    Prompts differ: a long one is slower by the token. So few tokens say little, what they say fades, and until there
    are many a worker counts as its peers do; else one long prompt would keep all others away from it, and its rate
    as it is.
    """

    prompt_tokens: float = 0.0
    prompt_seconds: float = 0.0
    step: StepTimeFit | None = None
    memory: FetchStats = field(default_factory=FetchStats)
    disk: FetchStats = field(default_factory=FetchStats)

    def measure_prefill(self, tokens: int, seconds: float) -> None:
        """So many prompt tokens were computed, in so much time."""
        if seconds >= MIN_MEASURE_SECONDS and tokens > 0:
            self.prompt_tokens += tokens
            self.prompt_seconds += seconds

    def fade(self) -> None:
        """A second has passed."""
        self.prompt_tokens *= DECAY_PER_SECOND
        self.prompt_seconds *= DECAY_PER_SECOND
        self.memory.fade()
        self.disk.fade()

    def prefill_rate(self, usual: float) -> float:
        """Prompt tokens a second, between what its peers do and what it has shown."""
        return (self.prompt_tokens + PRIOR_SECONDS * usual) / (self.prompt_seconds + PRIOR_SECONDS)

    def measure_decode(self, tokens: int, steps: int, seconds: float) -> None:
        """So many tokens were generated in so many steps, a token for each sequence in a step."""
        if seconds < MIN_MEASURE_SECONDS or tokens <= 0 or steps <= 0:
            return
        if self.step is None:
            self.step = StepTimeFit()
        self.step.add(tokens / steps, seconds / steps)

    @property
    def decode_rate(self) -> float | None:
        """Tokens a second of one sequence, at the batch sizes of late."""
        return 1.0 / self.step.mean_seconds if self.step is not None else None

    def itl_seconds(self, num_running: int) -> float:
        """Predicted time between two tokens with so many sequences in the batch."""
        return self.step.at(num_running) if self.step is not None else DEFAULT_ITL_SECONDS


class StepTimeFit:
    """Seconds a step = a + b * sequences, least squares with the past fading; never falling, never negative."""

    __slots__ = ("_mean_n", "_num", "_var_n", "_with_n", "mean_seconds")

    def __init__(self) -> None:
        self._num = 0
        self._mean_n = self._var_n = self._with_n = 0.0
        self.mean_seconds = 0.0

    def add(self, n: float, seconds: float) -> None:
        """A measured step time at a batch size."""
        self._num += 1
        share = max(NEWEST_SHARE, 1 / self._num)
        dn, ds = n - self._mean_n, seconds - self.mean_seconds
        self._mean_n += share * dn
        self.mean_seconds += share * ds
        self._var_n = (1 - share) * (self._var_n + share * dn * dn)
        self._with_n = (1 - share) * (self._with_n + share * dn * ds)

    def at(self, n: float) -> float:
        """The line at a batch size."""
        slope = max(self._with_n / self._var_n, 0.0) if self._var_n > MIN_SPREAD else 0.0
        return max(self.mean_seconds + slope * (n - self._mean_n), 0.1 * self.mean_seconds)


# until the first answer has ended
DEFAULT_OUTPUT_TOKENS = 256.0
# weight of the newest answer; about the last hundred count
LENGTH_NEWEST_SHARE = 0.02
MAX_LENGTH_MODELS = 1024


class OutputLengths:
    """Mean answer by model, with the past fading."""

    def __init__(self) -> None:
        self._means: OrderedDict[str, float] = OrderedDict()

    def record(self, model: str, tokens: int) -> None:
        """An answer has ended by itself after so many tokens."""
        if tokens <= 0:
            return
        mean = self._means.get(model, DEFAULT_OUTPUT_TOKENS)
        self._means[model] = mean + LENGTH_NEWEST_SHARE * (tokens - mean)
        self._means.move_to_end(model)
        if len(self._means) > MAX_LENGTH_MODELS:
            self._means.popitem(last=False)

    def expected(self, model: str, max_tokens: int) -> int:
        """How many tokens the next answer will have, at most `max_tokens`."""
        return min(max_tokens, round(self._means.get(model, DEFAULT_OUTPUT_TOKENS)))
