"""What the engine is held to on a CPU, beside the figures of one comparison: met, or short by how much."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

Figures = Mapping[str, float]
OURS = "weft"
READ_SHARE, FIRST_TOKEN_SECONDS = 0.85, 3.0
PREFILL, FIRST_TOKEN = "prefill tok/s", "first token, s"
# A step of ours is to take no more than this share of the peer's: of its quickest dtype in this run.
STEPS = ((1, "llama.cpp", 1.0), (8, "llama.cpp", 0.85), (32, "vLLM", 0.9))


@dataclass(frozen=True, slots=True)
class Bar:
    """`found` is to be at most `bar`, or at least; None: what it is compared with was not measured."""

    name: str
    found: float | None
    bar: float
    is_most: bool = True

    @property
    def verdict(self) -> str:
        """In a word."""
        if self.found is None:
            return "not measured"
        return "met" if (self.found <= self.bar if self.is_most else self.found >= self.bar) else "short"


def step_of(batch: int) -> str:
    """The figure's name."""
    return f"batch {batch}, ms"


def bars(ours: str, results: Mapping[str, Figures], least_step_ms: float) -> Iterator[Bar]:
    """Of one of our dtypes. `least_step_ms`: what reading the weights, keys and values of batch 1 takes."""
    mine = results[ours]
    for batch in (1, 8, 32):
        yield Bar(f"step at batch {batch}, of the quickest peer's", _ratio(step_of(batch), mine, results, ""), 1.0)
    for batch, peer, share in STEPS:
        yield Bar(f"step at batch {batch}, of {peer}'s", _ratio(step_of(batch), mine, results, peer), share)
    rates = [figures[PREFILL] for name, figures in results.items() if not name.startswith(OURS)]
    yield Bar("prefill, of the quickest peer's rate", mine[PREFILL] / max(rates) if rates else None, 1.0, False)
    alone = mine.get(step_of(1))
    yield Bar("read bandwidth at batch 1", least_step_ms / alone if alone else None, READ_SHARE, False)
    yield Bar("process start to first token, s", mine[FIRST_TOKEN], FIRST_TOKEN_SECONDS)


def _ratio(key: str, mine: Figures, results: Mapping[str, Figures], peer: str) -> float | None:
    """Of the best of a peer's dtypes, or of all peers."""
    peers = [figures for name, figures in results.items() if name.startswith(peer) and not name.startswith(OURS)]
    theirs = [figures[key] for figures in peers if key in figures]
    if key not in mine or not theirs:
        return None
    return mine[key] / min(theirs)


def is_behind(figures: Figures, other: Figures, by: float = 1.1) -> bool:
    """In everything, by so much: another round of it could show nothing new."""
    worse = [other[key] / figures[key] if key == PREFILL else figures[key] / other[key] for key in other]
    return min(worse) >= by
