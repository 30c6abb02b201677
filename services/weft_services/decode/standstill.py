"""Workers of both roles can wait for one another: the pool of each is held by prompts that the other is to compute, and
has no room for the other's. Whoever sees that had better compute one of its own. Knows the engine's load, no peers.
"""

from __future__ import annotations

from collections.abc import Callable

from weft.engine.messages import EngineLoad


class Standstill:
    """One prompt's look at its own worker, now and then while another one is to compute it.

    `load` is the engine's latest, `num_own` how many sequences decode here: whatever waits beside them is lent.
    """

    def __init__(self, load: Callable[[], EngineLoad], num_own: Callable[[], int]) -> None:
        self._load = load
        self._num_own = num_own
        self._num_made: int | None = None

    def lasts(self) -> bool:
        """Since the last look prompts of others have waited for room here, and nothing was computed."""
        load = self._load()
        is_there = not load.num_running and load.num_waiting > self._num_own()
        num_made = load.computed_prompt_tokens + load.generated_tokens if is_there else None
        self._num_made, before = num_made, self._num_made
        return num_made is not None and num_made == before
