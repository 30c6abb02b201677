"""Names, shapes and stored dtypes of the tensors that a checkpoint must hold, as on Hugging Face. No torch."""

from __future__ import annotations

from weft.model.quantization import ACTIVATION_SCALES, KV_SCALES, expert_shapes, packed_shapes
from weft.model.spec import Experts, HeadNorm, Latent, LayerSpec, ModelConfig

Shapes = dict[str, tuple[int, ...]]


def stored_name(name: str, config: ModelConfig) -> str:
    """Return a checkpoint's name of a tensor or module that is `name` to the building blocks."""
    for ours, theirs in config.renamed:
        name = name.replace(ours, theirs)
    return name


def expected_tensors(config: ModelConfig) -> Shapes:
    """Return name and shape of every tensor that a checkpoint of this config must hold.

    A tied checkpoint may hold `lm_head.weight` as well; it is not expected and not read.
    """
    return {stored_name(name, config): shape for name, shape in model_tensors(config).items()}


def model_tensors(config: ModelConfig) -> Shapes:
    """Return the same tensors by the names that building blocks use; see `stored_name`."""
    root = config.prefix + "model."
    shapes: Shapes = {root + "embed_tokens.weight": (config.vocab_size, config.hidden_size)}
    for index, layer in enumerate(config.layers):
        shapes |= layer_tensors(config, f"{root}layers.{index}.", layer)
    shapes |= _norms(config, root + "norm")
    if not config.is_tied:
        shapes[config.prefix + "lm_head.weight"] = (config.vocab_size, config.hidden_size)
    return shapes


def is_ignored(name: str, config: ModelConfig) -> bool:
    """Return True for a tensor that may be present but is not read, such as rotary frequencies or a tied head.

    Activations and the KV cache are not quantized, so a quantized checkpoint's scales of them are not read.
    """
    is_head = config.is_tied and name == stored_name(config.prefix + "lm_head.weight", config)
    is_scale = config.quantization is not None and name.endswith(ACTIVATION_SCALES + KV_SCALES)
    return is_head or is_scale or name.endswith("rotary_emb.inv_freq") or name.startswith(config.ignored)


def layer_tensors(config: ModelConfig, root: str, layer: LayerSpec) -> Shapes:
    """Return the tensors of a decoder layer."""
    norms, attention = config.norms, root + "self_attn."
    names = norms.attention_input, norms.attention_output, norms.mlp_input, norms.mlp_output
    shapes: Shapes = {}
    for name in filter(None, names):
        shapes |= _norms(config, root + name)
    shapes |= attention_tensors(config, attention, layer, config.hidden_size)
    mlp = f"{root}{config.mlp_name}."
    if layer.has_experts and config.experts:
        return shapes | _experts(config, mlp, config.experts)
    return shapes | mlp_tensors(config, mlp)


def attention_tensors(config: ModelConfig, root: str, layer: LayerSpec, num_inputs: int) -> Shapes:
    """Return the tensors of a layer's attention; `num_inputs` is the width of what it reads."""
    if config.latent:
        return _latent(config, root, config.latent, num_inputs)
    return _grouped(config, root, layer, num_inputs)


def mlp_tensors(config: ModelConfig, root: str) -> Shapes:
    """Return the tensors of a dense MLP."""
    return _mlp(config, root, config.intermediate_size) | _mlp_biases(config, root)


def _norms(config: ModelConfig, name: str) -> Shapes:
    parts = ("weight", "bias") if config.norms.has_bias else ("weight",)
    return {f"{name}.{part}": (config.hidden_size,) for part in parts}


def linear_tensors(config: ModelConfig, name: str, num_out: int, num_in: int) -> Shapes:
    """Return the tensors of one linear module."""
    module = stored_name(name, config)
    shapes = packed_shapes(module + ".weight", (num_out, num_in), config.quantization)
    return {name + stored.removeprefix(module): shape for stored, shape in shapes.items()}


def _grouped(config: ModelConfig, root: str, layer: LayerSpec, num_inputs: int) -> Shapes:
    num_heads, gate = config.num_heads_with(layer.window), config.attention_gate
    hidden, q_size = config.hidden_size, num_heads * config.head_dim
    kv_size = config.num_kv_heads * config.head_dim
    shapes: Shapes = {}
    parts = (("q_proj", q_size), ("k_proj", kv_size), ("v_proj", kv_size))
    for name, size in (("qkv_proj", q_size + 2 * kv_size),) if config.is_qkv_fused else parts:
        shapes |= linear_tensors(config, root + name, size, num_inputs)
        if config.has_qkv_bias:
            shapes[f"{root}{name}.bias"] = (size,)
    if config.head_norm in (HeadNorm.WEIGHTED, HeadNorm.LAST):
        shapes |= {root + "q_norm.weight": (config.head_dim,), root + "k_norm.weight": (config.head_dim,)}
    if config.head_norm is HeadNorm.WIDE:
        shapes |= {root + "q_norm.weight": (q_size,), root + "k_norm.weight": (kv_size,)}
    if gate is not None:
        shapes |= linear_tensors(config, root + gate.name, num_heads if gate.is_per_head else q_size, num_inputs)
    shapes |= {root + "o_proj.bias": (hidden,)} if config.has_output_bias else {}
    shapes |= {root + "sinks": (num_heads,)} if config.has_sinks else {}
    return shapes | linear_tensors(config, root + "o_proj", hidden, q_size)


def _latent(config: ModelConfig, root: str, latent: Latent, num_inputs: int) -> Shapes:
    hidden, heads = config.hidden_size, config.num_heads
    q_size = heads * (latent.nope_dim + latent.rope_dim)
    shapes: Shapes = {}
    if latent.q_rank:
        shapes |= linear_tensors(config, root + "q_a_proj", latent.q_rank, num_inputs)
        shapes[root + "q_a_layernorm.weight"] = (latent.q_rank,)
        shapes |= linear_tensors(config, root + "q_b_proj", q_size, latent.q_rank)
    else:
        shapes |= linear_tensors(config, root + "q_proj", q_size, num_inputs)
    shapes |= linear_tensors(config, root + "kv_a_proj_with_mqa", latent.kv_rank + latent.rope_dim, num_inputs)
    shapes[root + "kv_a_layernorm.weight"] = (latent.kv_rank,)
    shapes |= linear_tensors(config, root + "kv_b_proj", heads * (latent.nope_dim + latent.value_dim), latent.kv_rank)
    return shapes | linear_tensors(config, root + "o_proj", hidden, heads * latent.value_dim)


def _mlp(config: ModelConfig, root: str, size: int) -> Shapes:
    hidden = config.hidden_size
    shapes: Shapes = {}
    for name in into_mlp(config):
        shapes |= linear_tensors(config, root + name, 2 * size if name == "gate_up_proj" else size, hidden)
    return shapes | linear_tensors(config, root + "down_proj", hidden, size)


def into_mlp(config: ModelConfig) -> tuple[str, ...]:
    """Return the names of the projections into an MLP."""
    if config.is_gate_up_fused:
        return ("gate_up_proj",)
    return ("gate_proj", "up_proj") if config.is_gated else ("up_proj",)


def _mlp_biases(config: ModelConfig, root: str) -> Shapes:
    if not config.has_mlp_bias:
        return {}
    size = (2 if config.is_gate_up_fused else 1) * config.intermediate_size
    return {
        **{f"{root}{name}.bias": (size,) for name in into_mlp(config)},
        root + "down_proj.bias": (config.hidden_size,),
    }


def _experts(config: ModelConfig, root: str, experts: Experts) -> Shapes:
    hidden, size, count = config.hidden_size, experts.size, experts.num_experts
    shapes: Shapes = {f"{root}{experts.router}.weight": (count, hidden)}
    if experts.has_bias:
        shapes[root + experts.bias] = (1, count) if experts.is_bias_row else (count,)
    if experts.is_biased:
        shapes[f"{root}{experts.router}.bias"] = (count,)
        shapes |= {
            root + "experts.gate_up_proj_bias": (count, 2 * size),
            root + "experts.down_proj_bias": (count, hidden),
        }
    if experts.is_fused:
        for name, num_out, num_in in (("gate_up_proj", 2 * size, hidden), ("down_proj", hidden, size)):
            module, how = f"{root}experts.{name}", config.quantization
            packed = expert_shapes(stored_name(module, config), (count, num_out, num_in), how)
            matrix = (num_out, num_in) if experts.is_output_first else (num_in, num_out)
            shapes |= {f"{module}_{part}": shape for part, shape in packed.items()} or {module: (count, *matrix)}
    else:
        gate, up, down = experts.projections
        for index in range(count):
            expert = f"{root}experts.{index}."
            for name in (gate, up):
                shapes |= linear_tensors(config, expert + name, size, hidden)
            shapes |= linear_tensors(config, expert + down, hidden, size)
    if experts.shared_gate:
        shapes[f"{root}{experts.shared_gate}.weight"] = (1, hidden)
    if experts.shared_size:
        shapes |= _mlp(config, f"{root}{experts.shared}.", experts.shared_size)
    return shapes
