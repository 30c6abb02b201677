"""Ids and seeds: never the same twice, in threads and in forked children either."""

from __future__ import annotations

import os
import re
from concurrent.futures import ThreadPoolExecutor

from weft.ids import new_id, new_seed


def test_no_id_is_given_out_twice_whatever_threads_ask() -> None:
    with ThreadPoolExecutor(8) as pool:
        ids = list(pool.map(lambda _: new_id(), range(20_000)))
    assert len(set(ids)) == len(ids)
    assert all(re.fullmatch("[0-9a-f]{32}", each) for each in ids[:100])


def test_seeds_have_63_bits() -> None:
    seeds = [new_seed() for _ in range(1000)]
    assert max(seeds) < 2**63
    assert max(seeds) >= 2**62
    assert len(set(seeds)) == len(seeds)


def test_a_forked_child_has_ids_of_its_own() -> None:
    new_id()  # there are more at hand now
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        os.write(writing, new_id().encode())
        os._exit(0)
    os.waitpid(child, 0)
    told = os.read(reading, 64).decode()
    os.close(reading)
    os.close(writing)
    assert told not in {new_id() for _ in range(1000)}
