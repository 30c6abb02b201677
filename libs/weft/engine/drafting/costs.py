"""Measured seconds of decode steps by their rows, and the choice of the number of drafts that saves time.

T(r) is the duration of a step with r rows, in seconds, without the part that grows with the context:

    seconds of a step = T(rows) + context_seconds * context tokens of all rows

T0(n) is T of a step with n sequences and no drafts. Both are averages of the engine's own steps.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from collections.abc import Sequence as Items
from itertools import pairwise

from weft.engine.drafting.drafter import DecodeStep

# Rows up to which steps of each number have an average of their own; a larger step counts for the last below it.
BUCKETS: tuple[int, ...] = (*range(1, 17), 20, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
# A step is never taken for longer than this multiple of the average: the machine did something else.
MAX_OUTLIER = 4.0
# An average moves by 1/10 of the difference; by up to 1/2 if its last step was 256 steps ago.
LEAST_WEIGHT, MOST_WEIGHT = 0.1, 0.5
MAX_AGE = 512
MAX_UNSEEN = 4096
# Choices must save this share of the time for each token, because averages are not exact.
HYSTERESIS = 0.03
# Context tokens squared: until steps differ by more than this, the context slope stays near 0.
MIN_VARIATION = 1e5


class _Average:
    """Mean seconds and mean context tokens of steps in one bucket."""

    __slots__ = ("context", "count", "measured_at", "seconds")

    def __init__(self) -> None:
        self.seconds = self.context = 0.0
        self.count = self.measured_at = 0

    def add(self, seconds: float, context: float, now: int) -> tuple[float, float]:
        """Add a step, and return how far its seconds and context were from the means."""
        self.count += 1
        if self.count == 1:
            self.seconds, self.context, self.measured_at = seconds, context, now
            return 0.0, 0.0
        more_seconds, more_context = min(seconds, MAX_OUTLIER * self.seconds) - self.seconds, context - self.context
        weight = max(LEAST_WEIGHT, min(MOST_WEIGHT, (now - self.measured_at) / MAX_AGE), 1 / self.count)
        self.seconds += weight * more_seconds
        self.context += weight * more_context
        self.measured_at = now
        return more_seconds, more_context


class StepCosts:
    """Learns the seconds of steps.

    - `context_seconds`: seconds for each context token of each row, from how steps of one bucket differ.
    - `prompt_row_seconds`: seconds for each row of a step with prompt rows, where arithmetic takes the time; None
      until such a step without drafts has run.
    """

    def __init__(self, shares_context: bool = False) -> None:
        """`shares_context`: all rows of a sequence read its context together, so that drafts add nothing to it."""
        self._shares_context = shares_context
        self.context_seconds = 0.0
        self.prompt_row_seconds: float | None = None
        self._plain = [_Average() for _ in range(BUCKETS[-1] + 1)]  # by sequences
        self._drafted = [_Average() for _ in BUCKETS]
        self._curves: dict[int, list[float]] = {}
        self._num_steps = 0
        self._covariance = 0.0
        self._variance = MIN_VARIATION

    @property
    def draft_context_seconds(self) -> float:
        """Seconds for each context token of a draft."""
        return 0.0 if self._shares_context else self.context_seconds

    def measure(self, step: DecodeStep) -> None:
        """Learn from a finished step."""
        self._num_steps += 1
        num_sequences = len(step.outcomes)
        if step.num_prompt_rows:
            self._measure_mixed(step)
            return
        if step.num_rows > num_sequences:
            average = self._drafted[bisect_right(BUCKETS, step.num_rows) - 1]
        else:
            average = self._plain[min(num_sequences, BUCKETS[-1])]
        seconds, context = average.add(step.seconds, step.context_tokens, self._num_steps)
        self._covariance += seconds * context
        self._variance += context * context
        if self._num_steps % 16 == 0:
            self._curves.clear()
            self.context_seconds = max(0.0, self._covariance / self._variance)
            self._covariance *= 0.99
            self._variance = max(MIN_VARIATION, 0.99 * self._variance)

    def _measure_mixed(self, step: DecodeStep) -> None:
        plain = self.plain_seconds(len(step.outcomes), step.context_tokens)
        if plain is None or step.num_rows > len(step.outcomes):
            return
        seconds = max(0.0, step.seconds - plain) / step.num_prompt_rows
        known = self.prompt_row_seconds
        self.prompt_row_seconds = seconds if known is None else known + LEAST_WEIGHT * (seconds - known)

    def num_measured(self, num_sequences: int) -> int:
        """Return how many steps with this number of sequences and no drafts were measured."""
        return self._plain[min(num_sequences, BUCKETS[-1])].count

    def plain_seconds(self, num_sequences: int, context_tokens: int) -> float | None:
        """Return the duration of a step without drafts; None if none was measured."""
        average = self._plain[min(num_sequences, BUCKETS[-1])]
        if not average.count:
            return None
        return max(0.0, average.seconds + self.context_seconds * (context_tokens - average.context))

    def curve(self, num_sequences: int, max_drafts: int) -> list[float]:
        """Return T of steps with 0, 1, .. at least `max_drafts` drafts. Rises, and starts with T0."""
        known = self._curves.get(num_sequences)
        if known is None or len(known) <= max_drafts:
            known = self._curves[num_sequences] = self._interpolate(num_sequences, max(max_drafts, 16))
        return known

    def unmeasured(self, num_sequences: int, numbers: Iterable[int]) -> int:
        """Return the first of these numbers of drafts without a measured T; 0 if there is none.

        T between two measured ones may be far from the line that joins them. T is forgotten after MAX_UNSEEN steps.
        """
        for drafts in numbers:
            average = self._drafted[bisect_right(BUCKETS, num_sequences + drafts) - 1]
            if not average.count or self._num_steps - average.measured_at > MAX_UNSEEN:
                return drafts
        return 0

    def _interpolate(self, num_sequences: int, max_drafts: int) -> list[float]:
        """Join T0 and the measured T of more rows by lines; the last line goes on.

        A T that is above that of more rows is lowered to it. Without any measured T, a row more costs
        T0 / (sequences + 5): 17% of a step of one sequence.
        """
        first = self._without_context(self._plain[min(num_sequences, BUCKETS[-1])])
        points = [(num_sequences, first)]
        for rows, average in zip(reversed(BUCKETS), reversed(self._drafted), strict=True):
            if average.count and rows > num_sequences:
                least = points[1][1] if len(points) > 1 else average.seconds
                points.insert(1, (rows, max(first, min(least, self._without_context(average)))))
        curve = [first]
        for (left, low), (right, high) in pairwise(points):
            curve += [low + (high - low) * step / (right - left) for step in range(1, right - left + 1)]
        rise = (curve[-1] - first) / (len(curve) - 1) if len(curve) > 1 else first / (num_sequences + 5)
        curve += [curve[-1] + rise * step for step in range(1, max_drafts + 2 - len(curve))]
        return curve

    def _without_context(self, average: _Average) -> float:
        return max(0.0, average.seconds - self.context_seconds * average.context)


class DraftOrder:
    """The drafts of all sequences in a step, the most probable first.

    `survivals[i][j]`: the probability s that draft j of sequence i and all before it are accepted; falls with j.
    """

    def __init__(self, survivals: Items[Items[float]]) -> None:
        self._num_sequences = len(survivals)
        entries = [(s, -place, index) for index, each in enumerate(survivals) for place, s in enumerate(each)]
        self._entries = sorted(entries, reverse=True)
        self.most = len(entries)

    def below(self, num_drafts: int) -> Iterable[int]:
        """Return the smaller numbers of drafts, the largest first."""
        return range(num_drafts - 1, 0, -1)

    def best(self, contexts: Items[int], curve: Items[float], context_seconds: float) -> int:
        """Return the number of drafts that gives the most tokens a second.

        The first B drafts give (n + their sum of s) tokens in T(n + B) seconds. Without drafts, n sequences gain n
        tokens in T0(n). Drafts must be better by HYSTERESIS.
        """
        tokens = float(self._num_sequences)
        context = sum(contexts) * context_seconds
        best, num_best = tokens / max(1e-9, curve[0] + context) * (1 + HYSTERESIS), 0
        for number, (survival, _, index) in enumerate(self._entries, start=1):
            tokens += survival
            context += contexts[index] * context_seconds
            if (rate := tokens / max(1e-9, curve[number] + context)) > best:
                best, num_best = rate, number
        return num_best

    def split(self, num_drafts: int) -> list[int]:
        """Return how many of the first `num_drafts` belong to each sequence."""
        counts = [0] * self._num_sequences
        for _, _, index in self._entries[:num_drafts]:
            counts[index] += 1
        return counts
