"""How config.json spells rotary embeddings: `rope_parameters` (transformers 5) or `rope_scaling` and `rope_theta`."""

from __future__ import annotations

import math

from weft.model.fields import Fields
from weft.model.spec import Rope

KINDS = ("default", "linear", "llama3", "yarn")


def read_rope(fields: Fields, max_positions: int) -> Rope:
    """Raises BadCheckpoint for kinds that are not known and fields that are missing."""
    name = "rope_parameters" if fields.values.get("rope_parameters") else "rope_scaling"
    rope = fields.inner(name)
    theta = rope.number("rope_theta", fields.number("rope_theta", 10_000.0))
    for source in (rope, fields):
        if source.number("partial_rotary_factor", 1.0) != 1.0:
            raise source.fail("partial_rotary_factor", "rotating a part of each head is not supported")
    kind = rope.values.get("rope_type", rope.values.get("type", "default"))
    if kind not in KINDS:
        raise fields.fail(f"{name}.rope_type", f"{kind!r} is not supported; supported: {', '.join(KINDS)}")
    if kind == "default":
        return Rope(theta)
    if kind == "linear":
        return Rope(theta, "linear", rope.number("factor"))
    return _llama3(rope, theta) if kind == "llama3" else _yarn(rope, theta, max_positions)


def mscale(factor: float, weight: float = 1.0) -> float:
    """yarn's growth of attention scores with the context."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _llama3(rope: Fields, theta: float) -> Rope:
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    if high < low:
        raise rope.fail("high_freq_factor", f"must not be below low_freq_factor {low}, found {high}")
    return Rope(theta, "llama3", rope.number("factor"), low, high, rope.whole("original_max_position_embeddings"))


def _yarn(rope: Fields, theta: float, max_positions: int) -> Rope:
    original = rope.whole("original_max_position_embeddings", max_positions)
    factor = rope.number("factor", max_positions / original)
    attention_factor = rope.values.get("attention_factor")
    if attention_factor is None:
        # one of the two alone counts for nothing here, as in transformers
        weights = [rope.values.get("mscale"), rope.values.get("mscale_all_dim")]
        attention_factor = mscale(factor)
        if all(weights):
            attention_factor = mscale(factor, rope.number("mscale")) / mscale(factor, rope.number("mscale_all_dim"))
    else:
        attention_factor = rope.number("attention_factor")
    return Rope(
        theta,
        "yarn",
        factor,
        original_max_positions=original,
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        attention_factor=attention_factor,
        is_truncated=rope.flag("truncate", True),
    )
