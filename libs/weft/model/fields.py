"""Reads config.json: typed access to its fields, and what many families share. Errors name the file and the field.

A rotary embedding is `rope_parameters` (transformers 5), or `rope_scaling` and `rope_theta`. No torch.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from weft.errors import BadCheckpoint
from weft.file_io import read_json_object
from weft.model.spec import Activation, Experts, LayerSpec, ModelConfig, Rope, Scoring, Temperature

# Fields of a multimodal model's outer object that apply to its text model too.
INHERITED = ("architectures", "dtype", "torch_dtype", "eos_token_id", "tie_word_embeddings", "quantization_config")
MAX_COUNT = 10_000
MAX_WHOLE = 1 << 53
FLOATS = 2.0**-126, 2.0**126  # JSON as Python reads it has NaN and Infinity as well
DTYPES = ("float32", "bfloat16", "float16")
ORIGINAL = "original_max_position_embeddings"
KINDS = ("default", "linear", "llama3", "yarn", "longrope")
# the first name of longrope, and rotation by three positions, which are the same for text
ALIASES = {"su": "longrope", "mrope": "default"}
ACTIVATIONS = {
    "silu": Activation.SILU,
    "swish": Activation.SILU,
    "gelu": Activation.GELU,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
    "gelu_new": Activation.GELU_TANH,
    "relu2": Activation.RELU2,
}
FULL, SLIDING = "full_attention", "sliding_attention"


class Fields:
    """Numbers must be above 0 unless said otherwise; null counts as absent."""

    def __init__(self, path: Path, values: dict[str, Any], where: str = "") -> None:
        self.path = path
        self.values = values
        self._where = where

    def error(self, field: str, problem: str) -> BadCheckpoint:
        """Return the error to raise for a field."""
        return BadCheckpoint(f"{self.path}: {self._where}{field}: {problem}")

    def with_values(self, values: dict[str, Any]) -> Fields:
        """Return the same object of the same file with other values."""
        return Fields(self.path, values, self._where)

    def integer(self, field: str, default: int | None = None, least: int = 1) -> int:
        """Return a whole number, `least` or above."""
        value = default if (said := self.values.get(field)) is None else said
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= MAX_WHOLE:
            raise self.error(field, f"expected a whole number above {least - 1}, found {value!r}")
        return value

    def count(self, field: str, default: int | None = None, least: int = 1) -> int:
        """Return a count of things that each take memory, bounded because it is read before any weights."""
        if (value := self.integer(field, default, least)) > MAX_COUNT:
            raise self.error(field, f"expected at most {MAX_COUNT}, found {value}")
        return value

    def number(self, field: str, default: float | None = None) -> float:
        """Return a number above 0; float32 must hold it and its reciprocal."""
        value = default if (said := self.values.get(field)) is None else said
        if not isinstance(value, int | float) or isinstance(value, bool) or not FLOATS[0] <= value <= FLOATS[1]:
            raise self.error(field, f"expected a number above 0, found {value!r}")
        return float(value)

    def boolean(self, field: str, default: bool = False) -> bool:
        """Return a boolean, or `default` if the field is absent."""
        value = default if (said := self.values.get(field)) is None else said
        if not isinstance(value, bool):
            raise self.error(field, f"expected true or false, found {value!r}")
        return value

    def choice(self, field: str, supported: tuple[str, ...], default: str) -> str:
        """Return one of the `supported` strings."""
        value = default if (said := self.values.get(field)) is None else said
        if value not in supported:
            raise self.error(field, f"{value!r} is not supported; supported: {', '.join(supported)}")
        return str(value)

    def numbers(self, field: str) -> tuple[float, ...]:
        """Return a list of numbers above 0."""
        value = self.values.get(field)
        if not isinstance(value, list) or not all(type(each) in (int, float) and each > 0 for each in value):
            raise self.error(field, f"expected a list of numbers above 0, found {value!r}")
        return tuple(map(float, value))

    def refuse(self, *names: str) -> None:
        """Raise BadCheckpoint if one of these fields is neither absent, null nor false."""
        for name in names:
            if self.values.get(name):
                raise self.error(name, f"{self.values[name]!r} is not supported; supported: null")

    def integers(self, field: str, default: list[int] | None = None) -> list[int]:
        """Return a list of whole numbers, 0 or above."""
        value = default if (said := self.values.get(field)) is None else said
        if not isinstance(value, list) or not all(type(each) is int and each >= 0 for each in value):
            raise self.error(field, f"expected a list of whole numbers, found {value!r}")
        return value

    def strings(self, field: str) -> list[str]:
        """Return a list of strings, empty if the field is absent."""
        value = self.values.get(field) or []
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            raise self.error(field, f"expected a list of names, found {value!r}")
        return value

    def nested(self, field: str) -> Fields:
        """Return an object inside this one, empty if the field is absent."""
        value = self.values.get(field) or {}
        if not isinstance(value, dict):
            raise self.error(field, f"expected an object, found {value!r}")
        return Fields(self.path, value, f"{self._where}{field}.")

    def text_config(self) -> Fields:
        """Return the fields of a multimodal model's text model."""
        text = self.nested("text_config")
        outer = {name: self.values[name] for name in INHERITED if name in self.values}
        # null counts, except for fields that the outer object sets.
        said = {name: value for name, value in text.values.items() if value is not None or name not in outer}
        text.values = {**outer, **said}
        text.values["architectures"] = self.values.get("architectures")
        return text


def read_json(path: Path) -> Fields:
    """Raises BadCheckpoint, StorageUnavailable, as `read_json_object` does."""
    return Fields(path, read_json_object(path))


def set_defaults(fields: Fields, **defaults: Any) -> None:
    """Set fields that are absent. null counts as absent, except for key-value heads: one for each query head."""
    said = {name for name, value in fields.values.items() if value is not None or name == "num_key_value_heads"}
    fields.values = {**fields.values, **{name: value for name, value in defaults.items() if name not in said}}


def read_common(
    fields: Fields, *, has_qkv_bias: bool = False, rotates_part: bool = False, **defaults: Any
) -> ModelConfig:
    """Read a plain Llama. Absent fields take `defaults`, or else a Llama's. Raises BadCheckpoint.

    - `has_qkv_bias`: `attention_bias` means queries, keys and values, and not the output as in a Llama.
    - `rotates_part`: the family reads `partial_rotary_factor`.
    """
    set_defaults(fields, **defaults)
    num_heads, hidden_size = fields.integer("num_attention_heads"), fields.integer("hidden_size")
    head_dim = fields.integer("head_dim", hidden_size // num_heads)
    config = ModelConfig(
        architecture=str(fields.strings("architectures")[0]),
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        layers=(LayerSpec(),) * fields.count("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=fields.integer("num_key_value_heads", num_heads),
        head_dim=head_dim,
        rotary_dim=read_rotary_dim(fields, head_dim, rotates_part),
        activation=_activation(fields),
        has_qkv_bias=fields.boolean("attention_bias"),
        has_output_bias=fields.boolean("attention_bias") and not has_qkv_bias,
        has_mlp_bias=fields.boolean("mlp_bias"),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope=read_rope(fields),
        max_positions=read_context(fields),
        is_tied=fields.boolean("tie_word_embeddings"),
        eos_token_ids=read_eos(fields),
        dtype=fields.choice("dtype", DTYPES, fields.values.get("torch_dtype") or "float32"),
    )
    if config.num_heads % config.num_kv_heads:  # the forward pass assumes it
        raise fields.error("num_key_value_heads", f"{config.num_kv_heads} does not divide {config.num_heads} heads")
    return config


def read_eos(fields: Fields) -> tuple[int, ...]:
    """Return the end tokens that these fields name."""
    value = fields.values.get("eos_token_id")
    if value is None:
        return ()
    ids = value if isinstance(value, list) else [value]
    if not all(isinstance(each, int) and not isinstance(each, bool) and each >= 0 for each in ids):
        raise fields.error("eos_token_id", f"expected token ids, found {value!r}")
    return tuple(ids)


def _activation(fields: Fields) -> Activation:
    name = "hidden_act" if fields.values.get("hidden_act") is not None else "hidden_activation"
    return ACTIVATIONS[fields.choice(name, tuple(ACTIVATIONS), "silu")]


def read_rotary_dim(fields: Fields, head_dim: int, rotates_part: bool = True) -> int:
    """Return how many numbers of each head are rotated; 0 for all."""
    rope = rope_object(fields)
    source = rope if rope.values.get("partial_rotary_factor") is not None else fields
    factor = source.number("partial_rotary_factor", 1.0)
    if factor == 1.0:
        return 0
    if not rotates_part or factor > 1:
        raise source.error("partial_rotary_factor", f"{factor} is not supported; supported: 1.0")
    return int(head_dim * factor)


def read_window(fields: Fields, default: int) -> int:
    """Return `sliding_window`; 0 if it is null or 0."""
    if fields.values.get("sliding_window", default) in (None, 0):
        return 0
    return fields.integer("sliding_window", default)


def read_layers(fields: Fields, window: int, default: list[str]) -> tuple[LayerSpec, ...]:
    """Return a layer for each entry of `layer_types`, or of `default` if it is absent."""
    kinds = fields.strings("layer_types") or default
    if len(kinds) != len(default) or not set(kinds) <= {FULL, SLIDING}:
        raise fields.error("layer_types", f"expected {FULL} or {SLIDING} a layer, found {kinds!r}")
    return tuple(LayerSpec(window=window if kind == SLIDING else 0) for kind in kinds)


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
    kind = rope.values.get("rope_type", rope.values.get("type", "default"))
    kind = ALIASES.get(kind, kind)
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
    if kind == "longrope":
        return _longrope(rope, theta, positions)
    return _llama3(rope, theta) if kind == "llama3" else _yarn(rope, theta, positions)


def split_rope(fields: Fields) -> tuple[Fields, Fields]:
    """Return the fields for full layers and for layers with a window, each with its own rotary embedding.

    `rope_parameters` may hold one object for each kind of layer; `rope_scaling` is that of full layers.
    """
    both = fields.nested("rope_parameters").values
    full, local = dict(fields.values), {**fields.values, "rope_scaling": None}
    if FULL in both or SLIDING in both:
        full["rope_parameters"], local["rope_parameters"] = both.get(FULL), both.get(SLIDING)
    return fields.with_values(full), fields.with_values(local)


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


def _longrope(rope: Fields, theta: float, max_positions: int) -> Rope:
    """Phi's rotary embedding: a factor for each pair.

    Checkpoints have short factors for sequences within the original context, and long ones beyond it. A cache survives
    no switch between them, so the context that the model can serve decides.
    """
    original = rope.integer(ORIGINAL, max_positions)
    scale = rope.number("factor", max_positions / original)
    factors = rope.numbers("long_factor" if max_positions > original else "short_factor")
    attention_factor = math.sqrt(1 + math.log(scale) / math.log(original)) if scale > 1 else 1.0
    return Rope(
        theta,
        "longrope",
        scale,
        original_max_positions=original,
        attention_factor=rope.number("attention_factor", attention_factor),
        pair_factors=factors,
    )


def read_grouped_experts(fields: Fields, **defaults: Any) -> Experts:
    """Read DeepSeek-V3's mixture: biased sigmoid scores, experts of the best groups. Raises BadCheckpoint."""
    set_defaults(fields, **defaults)
    fields.choice("scoring_func", ("sigmoid",), "sigmoid")
    fields.choice("topk_method", ("noaux_tc",), "noaux_tc")
    if fields.integer("moe_layer_freq", 1) != 1:
        raise fields.error("moe_layer_freq", "only 1 is supported")
    size = fields.integer("moe_intermediate_size", 2048)
    experts = Experts(
        num_experts=fields.count("n_routed_experts", 256),
        top_k=fields.integer("num_experts_per_tok", 8),
        size=size,
        scoring=Scoring.SIGMOID_GROUPS,
        is_renormalised=fields.boolean("norm_topk_prob", True),
        factor=fields.number("routed_scaling_factor", 2.5),
        num_groups=fields.integer("n_group", 8),
        top_groups=fields.integer("topk_group", 4),
        shared_size=size * fields.integer("n_shared_experts", 1),
    )
    group, rest = divmod(experts.num_experts, experts.num_groups)
    if rest or group < 2 or experts.top_groups > experts.num_groups:
        raise fields.error("n_group", f"{experts.num_experts} experts in {experts.num_groups} groups cannot be")
    if experts.top_k > experts.top_groups * group:
        raise fields.error("num_experts_per_tok", f"{experts.top_k} of {experts.top_groups} groups of {group}")
    return experts


def read_mlp_kinds(
    fields: Fields, num_layers: int, num_dense: int, layers: tuple[LayerSpec, ...] = ()
) -> tuple[LayerSpec, ...]:
    """Return `layers`, with experts as `mlp_layer_types` says; the first `num_dense` have none if it is absent."""
    kinds = fields.strings("mlp_layer_types") or ["dense" if i < num_dense else "sparse" for i in range(num_layers)]
    if len(kinds) != num_layers or not set(kinds) <= {"dense", "sparse"}:
        raise fields.error("mlp_layer_types", f"expected dense or sparse a layer, found {kinds!r}")
    plain = layers or (LayerSpec(),) * num_layers
    return tuple(replace(layer, has_experts=kind == "sparse") for layer, kind in zip(plain, kinds, strict=True))


def read_query_growth(fields: Fields, max_positions: int) -> Temperature | None:
    """Read how the queries of Mistral's long-context models grow beyond the original context."""
    rope = rope_object(fields)
    if not rope.values.get("llama_4_scaling_beta"):
        return None
    floor = rope.integer(ORIGINAL, max_positions)
    return Temperature(floor, rope.number("llama_4_scaling_beta"), shift=0, is_everywhere=True)


def further_layers(fields: Fields, num_layers: int) -> tuple[str, ...]:
    """Return the names of layers past the last one: they predict further tokens and are not part of the model.

    Their default number is one.
    """
    names = ("num_nextn_predict_layers", "num_mtp_layers")
    counts = [fields.count(name, least=0) for name in names if fields.values.get(name) is not None]
    return tuple(f"model.layers.{num_layers + i}." for i in range(max(counts, default=1)))
