"""The decode benchmark compares like with like."""

from __future__ import annotations

import pytest
from loadtest.engine.dense import FAMILIES, shape_of
from loadtest.engine.shapes import weight_bytes


@pytest.mark.parametrize("family", FAMILIES)
def test_dense_shape_has_the_bytes_of_llama(family: str) -> None:
    config, llama = shape_of(family).config(), shape_of("llama").config()
    assert weight_bytes(config) == pytest.approx(weight_bytes(llama), rel=1e-3)
    assert config.experts is None
    assert config.latent is None
