"""The model that the workers' tests share."""

from __future__ import annotations

import pytest

from tests.weft.tiny_llama import Tiny, make_tiny


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """Random weights, shared key heads."""
    return make_tiny("grouped", tmp_path_factory.mktemp("tiny"))
