"""How often drafts are accepted, and which sources are worth asking again."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Items

from weft.engine.drafting.drafter import DraftSource, DraftToken

MAX_PLACES = 16
# An average is over about this many drafts.
MAX_COUNT = 50
# The first average counts as much as this many drafts.
PRIOR_COUNT = 4
# Rates of copies by their grade, before any was verified; see `TextMatch.grade`.
COPY_PRIORS = (0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
# Rates of a draft model's tokens by their grade: their probability in that model.
HEAD_PRIORS = (0.2, 0.4, 0.6, 0.75, 0.85, 0.95)
PRIORS = {DraftSource.GRAMMAR: (0.9,), DraftSource.HEAD: HEAD_PRIORS}
# A sequence's own results count n / (n + 8) against the engine's, n being at most 32 drafts.
OWN_PRIOR = 8.0
MAX_OWN = 32.0
MAX_RATE = 0.995
# Drafts of a source in a sequence after which its balance is drawn, and tokens until it is asked again.
NUM_JUDGED = 24
# The same for a draft model: its long proposals fail as a whole more often than copies.
NUM_JUDGED_OF_HEAD = 96
MIN_WAIT, MAX_WAIT = 32, 128
# After this number of proposals in a row that brought nothing, a sequence asks the draft model ever more rarely.
MAX_USELESS = 5


class SourceRecord:
    """What one source achieved in one sequence.

    - `factor`: accepted drafts as a multiple of what the engine's averages predicted.
    - `is_shut`: while the sequence is shorter than a length, because NUM_JUDGED drafts lost time.
    """

    __slots__ = ("_accepted", "_balance", "_num_judged", "_num_useless", "_open_at", "_predicted", "_wait", "factor")

    def __init__(self) -> None:
        self.factor = 1.0
        self._accepted = self._predicted = self._balance = 0.0
        self._num_judged = self._num_useless = self._open_at = 0
        self._wait = MIN_WAIT

    def is_shut(self, num_tokens: int) -> bool:
        """True if a sequence of this length should not ask the source."""
        return num_tokens < self._open_at

    def follow(self, is_accepted: bool, predicted: float) -> None:
        """Add a draft that was reached: all drafts before it were accepted."""
        self._accepted += is_accepted
        self._predicted += predicted
        if self._predicted > MAX_OWN:
            scale = MAX_OWN / self._predicted
            self._accepted *= scale
            self._predicted *= scale
        self.factor = (self._accepted + OWN_PRIOR) / (self._predicted + OWN_PRIOR)

    def judge(self, saved_seconds: float, num_drafts: int, num_tokens: int, least: int = NUM_JUDGED) -> None:
        """Add what drafts saved, less what they cost. After `least` drafts that lost, shut the source."""
        self._balance += saved_seconds
        self._num_judged += num_drafts
        if self._num_judged < least:
            return
        if self._balance < 0:
            self._open_at = num_tokens + self._wait
            self._wait = min(MAX_WAIT, 2 * self._wait)
        else:
            self._wait = MIN_WAIT
        self._balance, self._num_judged = 0.0, 0

    def judge_proposal(self, num_accepted: int, num_tokens: int) -> None:
        """After MAX_USELESS proposals in a row with no accepted draft, shut the source for 4 tokens, then 8, 16, .."""
        self._num_useless = 0 if num_accepted else self._num_useless + 1
        if self._num_useless >= MAX_USELESS:
            wait = min(MAX_WAIT, 4 << self._num_useless - MAX_USELESS)
            self._open_at = max(self._open_at, num_tokens + wait)


Records = dict[DraftSource, SourceRecord]


class AcceptanceRates:
    """Averages, for the whole engine, of how often a draft is accepted after all drafts before it were.

    Kept by source, grade and place in the proposal.
    """

    def __init__(self) -> None:
        self._rates: dict[tuple[DraftSource, int], list[float]] = {}
        self._counts: dict[tuple[DraftSource, int], list[int]] = {}

    def survival(self, drafts: Iterable[DraftToken], records: Records) -> list[float]:
        """Return for each draft the probability that it and all before it are accepted."""
        survival = 1.0
        survivals: list[float] = []
        for place, (_, source, grade) in enumerate(drafts):
            record = records.get(source)
            rate = self._of(source, grade)[min(place, MAX_PLACES - 1)]
            survival *= min(MAX_RATE, rate if record is None else rate * record.factor)
            survivals.append(survival)
        return survivals

    def learn(self, drafts: Items[DraftToken], num_accepted: int, records: Records) -> None:
        """Learn from verified drafts. Those behind the first rejected one show nothing."""
        for place, (_, source, grade) in enumerate(drafts[: num_accepted + 1]):
            at = min(place, MAX_PLACES - 1)
            is_accepted = place < num_accepted
            rates, counts = self._of(source, grade), self._counts[source, grade]
            records.setdefault(source, SourceRecord()).follow(is_accepted, rates[at])
            counts[at] = min(MAX_COUNT, counts[at] + 1)
            rates[at] += (is_accepted - rates[at]) / counts[at]

    def _of(self, source: DraftSource, grade: int) -> list[float]:
        rates = self._rates.get((source, grade))
        if rates is None:
            priors = PRIORS.get(source, COPY_PRIORS)
            rates = self._rates[source, grade] = [priors[min(grade, len(priors) - 1)]] * MAX_PLACES
            self._counts[source, grade] = [PRIOR_COUNT] * MAX_PLACES
        return rates
