"""Bounds the time that speculation loses against decoding without drafts."""

from __future__ import annotations

# share of the engine's time that drafts may lose
MAX_LOSS = 0.01
# Losses up to this are always allowed: a single slow step means nothing.
MIN_CAP_SECONDS = 0.03
# The cap is what may be lost in this time.
WINDOW_SECONDS = 20.0


class LossLedger:
    """Adds up the seconds that steps with drafts took longer than their tokens take without drafts.

    `spare_seconds`: what is left below half the cap. A draft model may lose that in one step, so that its wrong drafts
    never turn off drafts that cost less.

    After each step:  balance += seconds - T0 * tokens / sequences - MAX_LOSS * seconds of the step

    T0: seconds of a step without drafts. Gains count only down to -cap, so they pay for no long losses, but for the
    noise of single steps. Above the cap, drafts are off until the balance has fallen to half the cap. So the time S of
    a run has a bound, for all drafts. P: time of its tokens without drafts.

        S <= P + MAX_LOSS * S + 2 * cap + the loss of one step
    """

    def __init__(self) -> None:
        self.is_off = False
        self.spare_seconds = MIN_CAP_SECONDS / 2
        self._balance = 0.0
        self._elapsed = 0.0

    @property
    def loss_seconds(self) -> float:
        """What drafts have lost lately beyond what they may lose; 0 while they gain."""
        return max(0.0, self._balance)

    def add(self, seconds: float, lost_seconds: float = 0.0) -> None:
        """Add a step, and what its drafts lost; negative if they gained."""
        self._elapsed += seconds
        cap = max(MIN_CAP_SECONDS, MAX_LOSS * min(self._elapsed, WINDOW_SECONDS))
        self._balance = max(-cap, self._balance + lost_seconds - MAX_LOSS * seconds)
        self.spare_seconds = cap / 2 - self._balance
        self.is_off = self._balance > (cap / 2 if self.is_off else cap)
