"""How config.json spells rotary embeddings: `rope_parameters` (transformers 5) or `rope_scaling` and `rope_theta`."""

from __future__ import annotations

import math

from weft.model.fields import Fields
from weft.model.spec import Rope

ORIGINAL = "original_max_position_embeddings"
KINDS = ("default", "linear", "llama3", "yarn")


def read_context(fields: Fields) -> int:
    """Positions that a sequence may have: what the model was trained on, or what yarn stretches that to.

    Linear scaling counts for nothing: checkpoints that have it name the stretched length. Raises BadCheckpoint.
    """
    positions, rope = fields.integer("max_position_embeddings", 2048), read_rope(fields)
    if rope.kind == "yarn":
        positions = max(positions, int(rope.original_max_positions * rope.factor))
    # beyond this Qwen's long-context models attend in another way, which is not supported
    dual = fields.nested("dual_chunk_attention_config")
    return min(positions, dual.integer(ORIGINAL, positions))


def read_rope(fields: Fields) -> Rope:
    """Raises BadCheckpoint for kinds that are not known and fields that are missing."""
    rope = rope_object(fields)
    theta = rope.number("rope_theta", fields.number("rope_theta", 10_000.0))
    for source in (rope, fields):
        if source.number("partial_rotary_factor", 1.0) != 1.0:
            raise source.error("partial_rotary_factor", "rotating a part of each head is not supported")
    kind = rope.values.get("rope_type", rope.values.get("type", "default"))
    if kind not in KINDS:
        raise rope.error("rope_type", f"{kind!r} is not supported; supported: {', '.join(KINDS)}")
    if kind == "default":
        return Rope(theta)
    if kind == "linear":
        return Rope(theta, "linear", rope.number("factor"))
    if (original := fields.values.get(ORIGINAL)) is not None:  # beside the object: it wins, as in transformers
        rope.values = {**rope.values, ORIGINAL: original}
    positions = fields.integer("max_position_embeddings", 2048)
    if kind == "yarn" and theta == 1:
        raise fields.error("rope_theta", "yarn cannot stretch with 1, which turns all pairs alike")
    return _llama3(rope, theta) if kind == "llama3" else _yarn(rope, theta, positions)


def rope_object(fields: Fields) -> Fields:
    """The object that says how to rotate, by either name; empty where there is none."""
    new, old = fields.nested("rope_parameters"), fields.nested("rope_scaling")
    for rope in (new, old):
        for name, value in rope.values.items():
            if isinstance(value, dict):
                raise rope.error(name, "one rotary embedding for each kind of layer is not supported")
    for name, value in old.values.items() if new.values else ():
        if new.values.get("rope_type" if name == "type" else name) != value:
            raise old.error(name, f"{value!r} is not what rope_parameters says; keep one of the two objects")
    return new if new.values else old


def mscale(factor: float, weight: float = 1.0) -> float:
    """yarn's growth of attention scores with the context."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _llama3(rope: Fields, theta: float) -> Rope:
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    if high < low:
        raise rope.error("high_freq_factor", f"must not be below low_freq_factor {low}, found {high}")
    return Rope(theta, "llama3", rope.number("factor"), low, high, rope.integer(ORIGINAL))


def _yarn(rope: Fields, theta: float, max_positions: int) -> Rope:
    original = rope.integer(ORIGINAL, max_positions)
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
        is_truncated=rope.boolean("truncate", True),
    )
