"""What a checkpoint says about itself, as one frozen value, and the tensors it must hold.

Knows the Llama family's config.json and generation_config.json, as transformers 4 and 5 write them. Knows no torch.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.errors import BadCheckpoint

ARCHITECTURES = ("LlamaForCausalLM",)
DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary embedding. `kind` is default, linear or llama3; linear reads the factor as well, llama3 everything."""

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_positions: int = 0


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder-only model. `dtype` is what the checkpoint's tensors are meant to be, not what they run in."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: Rope
    max_positions: int
    is_tied: bool
    eos_token_ids: tuple[int, ...]
    dtype: str


class _Fields:
    """A JSON object that answers with the file and the field when a value is missing or of the wrong kind."""

    def __init__(self, path: Path, values: dict[str, Any]) -> None:
        self.path = path
        self.values = values

    def fail(self, field: str, problem: str) -> BadCheckpoint:
        return BadCheckpoint(f"{self.path}: {field}: {problem}")

    def whole(self, field: str, default: int | None = None) -> int:
        value = self.values.get(field)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.fail(field, f"expected a whole number above 0, found {value!r}")
        return value

    def number(self, field: str, default: float | None = None) -> float:
        value = self.values.get(field)
        value = default if value is None else value
        if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
            raise self.fail(field, f"expected a number above 0, found {value!r}")
        return float(value)

    def flag(self, field: str, default: bool = False) -> bool:
        value = self.values.get(field, default)
        if not isinstance(value, bool):
            raise self.fail(field, f"expected true or false, found {value!r}")
        return value


def read_config(model_dir: Path) -> ModelConfig:
    """Read `config.json` (and `generation_config.json` where there is one) of a Hugging Face checkpoint directory.

    Raises BadCheckpoint naming file and field.
    """
    fields = _read_json(model_dir / "config.json")
    architecture = _architecture(fields)
    num_heads = fields.whole("num_attention_heads")
    hidden_size = fields.whole("hidden_size")
    config = ModelConfig(
        architecture=architecture,
        vocab_size=fields.whole("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.whole("intermediate_size"),
        num_layers=fields.whole("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=fields.whole("num_key_value_heads", num_heads),
        head_dim=fields.whole("head_dim", hidden_size // num_heads),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope=_rope(fields),
        max_positions=fields.whole("max_position_embeddings", 2048),
        is_tied=fields.flag("tie_word_embeddings"),
        eos_token_ids=_eos_token_ids(model_dir, fields),
        dtype=_dtype(fields),
    )
    _check(fields, config)
    return config


def expected_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor a checkpoint of this config must hold, by its Hugging Face name, with its shape.

    A tied checkpoint may hold `lm_head.weight` as well; it is not expected and not read.
    """
    hidden, inter = config.hidden_size, config.intermediate_size
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        shapes[prefix + "input_layernorm.weight"] = (hidden,)
        shapes[prefix + "self_attn.q_proj.weight"] = (q_size, hidden)
        shapes[prefix + "self_attn.k_proj.weight"] = (kv_size, hidden)
        shapes[prefix + "self_attn.v_proj.weight"] = (kv_size, hidden)
        shapes[prefix + "self_attn.o_proj.weight"] = (hidden, q_size)
        shapes[prefix + "post_attention_layernorm.weight"] = (hidden,)
        shapes[prefix + "mlp.gate_proj.weight"] = (inter, hidden)
        shapes[prefix + "mlp.up_proj.weight"] = (inter, hidden)
        shapes[prefix + "mlp.down_proj.weight"] = (hidden, inter)
    shapes["model.norm.weight"] = (hidden,)
    if not config.is_tied:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


def _read_json(path: Path) -> _Fields:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BadCheckpoint(f"{path}: no such file") from None
    except (OSError, ValueError) as error:
        raise BadCheckpoint(f"{path}: not readable as JSON: {error}") from error
    if not isinstance(values, dict):
        raise BadCheckpoint(f"{path}: expected a JSON object, found {type(values).__name__}")
    return _Fields(path, values)


def _architecture(fields: _Fields) -> str:
    names = fields.values.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise fields.fail("architectures", f"expected a list of names, found {names!r}")
    if names[0] not in ARCHITECTURES:
        raise fields.fail("architectures", f"{names[0]} is not supported; supported: {', '.join(ARCHITECTURES)}")
    return names[0]


def _check(fields: _Fields, config: ModelConfig) -> None:
    """What the forward pass takes for granted."""
    if config.num_heads % config.num_kv_heads:
        raise fields.fail("num_key_value_heads", f"{config.num_kv_heads} does not divide {config.num_heads} heads")
    if config.head_dim % 2:
        raise fields.fail("head_dim", f"must be even for rotary embeddings, found {config.head_dim}")
    activation = fields.values.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise fields.fail("hidden_act", f"{activation!r} is not supported; supported: silu")
    for name in ("attention_bias", "mlp_bias"):
        if fields.flag(name):
            raise fields.fail(name, "biases are not supported")
    if fields.values.get("quantization_config"):
        raise fields.fail("quantization_config", "quantized checkpoints are not supported")


def _rope(fields: _Fields) -> Rope:
    """`rope_parameters` (transformers 5), or `rope_scaling` beside a bare `rope_theta` (transformers 4)."""
    name = "rope_parameters" if fields.values.get("rope_parameters") else "rope_scaling"
    values = fields.values.get(name) or {}
    if not isinstance(values, dict):
        raise fields.fail(name, f"expected an object, found {values!r}")
    rope = _Fields(fields.path, values)
    theta = rope.number("rope_theta", fields.number("rope_theta", 10_000.0))
    kind = values.get("rope_type", values.get("type", "default"))
    if kind == "default":
        return Rope(theta)
    if kind == "linear":
        return Rope(theta, "linear", rope.number("factor"))
    if kind != "llama3":
        raise fields.fail(f"{name}.rope_type", f"{kind!r} is not supported; supported: default, linear, llama3")
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    if high <= low:
        raise fields.fail(f"{name}.high_freq_factor", f"must be above low_freq_factor {low}, found {high}")
    return Rope(theta, "llama3", rope.number("factor"), low, high, rope.whole("original_max_position_embeddings"))


def _dtype(fields: _Fields) -> str:
    name = fields.values.get("dtype") or fields.values.get("torch_dtype") or "float32"
    if name not in DTYPES:
        raise fields.fail("dtype", f"{name!r} is not supported; supported: {', '.join(DTYPES)}")
    return str(name)


def _eos_token_ids(model_dir: Path, fields: _Fields) -> tuple[int, ...]:
    """generation_config.json wins where it names any; it is the file that chat tuning updates."""
    generation = model_dir / "generation_config.json"
    sources = [_read_json(generation)] if generation.exists() else []
    for source in [*sources, fields]:
        value = source.values.get("eos_token_id")
        if value is None:
            continue
        ids = value if isinstance(value, list) else [value]
        if not all(isinstance(each, int) and not isinstance(each, bool) and each >= 0 for each in ids):
            raise source.fail("eos_token_id", f"expected token ids, found {value!r}")
        return tuple(ids)
    return ()
