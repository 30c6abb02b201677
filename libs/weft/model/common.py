"""Fields of config.json that all families share: sizes, dtype, end tokens."""

from __future__ import annotations

from weft.model.fields import Fields
from weft.model.quantization import read_quantization
from weft.model.rope_fields import read_context, read_rope
from weft.model.spec import LayerSpec, ModelConfig

DTYPES = ("float32", "bfloat16", "float16")


def read_common(fields: Fields, **defaults: float) -> ModelConfig:
    """Read a plain Llama. Absent fields take `defaults`, or else a Llama's. Raises BadCheckpoint."""
    # null counts as absent, except for key-value heads, where it means one for each query head.
    said = {name for name, value in fields.values.items() if value is not None or name == "num_key_value_heads"}
    fields.values = {**fields.values, **{name: value for name, value in defaults.items() if name not in said}}
    num_heads, hidden_size = fields.integer("num_attention_heads"), fields.integer("hidden_size")
    config = ModelConfig(
        architecture=str(fields.strings("architectures")[0]),
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        layers=(LayerSpec(),) * fields.count("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=fields.integer("num_key_value_heads", num_heads),
        head_dim=fields.integer("head_dim", hidden_size // num_heads),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope=read_rope(fields),
        max_positions=read_context(fields),
        is_tied=fields.boolean("tie_word_embeddings"),
        eos_token_ids=read_eos(fields),
        dtype=fields.choice("dtype", DTYPES, fields.values.get("torch_dtype") or "float32"),
        quantization=read_quantization(fields),
    )
    _check(fields, config)
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


def _check(fields: Fields, config: ModelConfig) -> None:
    """Check what the forward pass assumes."""
    if config.num_heads % config.num_kv_heads:
        raise fields.error("num_key_value_heads", f"{config.num_kv_heads} does not divide {config.num_heads} heads")
    activation = fields.values.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise fields.error("hidden_act", f"{activation!r} is not supported; supported: silu")
    for name in ("attention_bias", "mlp_bias"):
        if fields.boolean(name):
            raise fields.error(name, "biases are not supported")
