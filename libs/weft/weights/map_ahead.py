"""Work that threads do ahead of the one that takes its results. Knows neither files nor tensors."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from itertools import islice
from typing import TypeVar

Result = TypeVar("Result")


def map_ahead(
    threads: ThreadPoolExecutor, work: Callable[..., Result], steps: Iterable[tuple[int | str, ...]], num_ahead: int
) -> Generator[Result]:
    """What `work` makes of each step, in their order; so many are done, or being done, before they are asked for.

    To be closed (`contextlib.closing`): then, and after an error of the work or an interrupt, what has not begun never
    does, and what has is waited for. Nobody reads any more from a file that is closed next.
    """
    rest, pending = iter(steps), deque[Future[Result]]()
    try:
        pending.extend(threads.submit(work, *step) for step in islice(rest, num_ahead))
        while pending:
            result = pending[0].result()
            pending.popleft()
            pending.extend(threads.submit(work, *step) for step in islice(rest, 1))
            yield result
    finally:
        wait([each for each in pending if not each.cancel()])
