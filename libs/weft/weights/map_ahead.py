"""Runs work in threads ahead of the consumer and yields the results in order."""

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
    """Yield work(*step) for each step, in order, with up to `num_ahead` results done or under way in advance.

    Close the generator (`contextlib.closing`). On close, error or interrupt, pending work is cancelled and running
    work is awaited, so that no thread reads from a file that the caller closes next.
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
