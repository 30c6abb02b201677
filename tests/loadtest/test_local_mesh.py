"""The mesh that benchmarks start for themselves, where it does not start."""

from __future__ import annotations

import pytest
from loadtest.local_mesh import LocalMesh
from loadtest.processes import START_SECONDS, BenchError


def test_a_mesh_that_ends_at_its_start_is_told_at_once_in_its_own_words(request: pytest.FixtureRequest) -> None:
    assert float(request.config.getini("timeout")) < START_SECONDS, "or nobody would see that it waits"
    with pytest.raises(BenchError, match="--model /nowhere: is no directory"), LocalMesh("/nowhere"):
        pass
