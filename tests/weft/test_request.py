"""Ids and seeds of requests."""

from __future__ import annotations

import re

from weft.request import new_id, new_seed


def test_ids_and_seeds_are_random() -> None:
    ids, seeds = {new_id() for _ in range(1000)}, {new_seed() for _ in range(1000)}
    assert len(ids) == len(seeds) == 1000
    assert all(re.fullmatch("[0-9a-f]{32}", each) for each in ids)
    assert 2**62 <= max(seeds) < 2**63
