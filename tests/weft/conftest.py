"""Tiny models, made once."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest

from tests.weft.tiny_families import TinyFamily, make_family
from tests.weft.tiny_llama import VARIANTS, Tiny, make_tiny


@pytest.fixture(scope="session")
def tiny_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Tiny]:
    """A tiny model by the name of its variant."""
    return cache(lambda variant: make_tiny(variant, tmp_path_factory.mktemp(variant)))


@pytest.fixture(params=list(VARIANTS))
def tiny(request: pytest.FixtureRequest, tiny_of: Callable[[str], Tiny]) -> Tiny:
    """Every variant in turn."""
    return tiny_of(request.param)


@pytest.fixture
def grouped(tiny_of: Callable[[str], Tiny]) -> Tiny:
    """The plainest one."""
    return tiny_of("grouped")


@pytest.fixture(scope="session")
def family_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], TinyFamily]:
    """A tiny model of a family by the name in `FAMILIES`."""
    return cache(lambda name: make_family(name, tmp_path_factory.mktemp(name)))
