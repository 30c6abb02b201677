"""Reads the config of an EAGLE-3 draft head, in any of five published formats. No torch.

What the formats leave open, such as biases and norms of heads, follows from the tensors that the files hold.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from weft.errors import BadCheckpoint
from weft.model.draft_layers import Producer, default_reading, draft_layer
from weft.model.families.deepseek import read_latent_model
from weft.model.fields import FULL, Fields, read_common, read_layers, read_window, set_defaults
from weft.model.quantization import is_shape, read_quantization, stored_dtypes
from weft.model.spec import FINAL, HeadNorm, LayerSpec, ModelConfig
from weft.model.tensors import Shapes, attention_tensors, is_ignored, linear_tensors, mlp_tensors

Stored = Mapping[str, tuple[str, tuple[int, ...]]]
"""Dtype, by safetensors' name, and shape of every tensor in the files of a head."""

LATENT = ("Eagle3DeepseekV2ForCausalLM", "Eagle3DeepseekV3ForCausalLM")
GROUPED = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Qwen3ForCausalLM")
PARALLEL = ("PEagleDraftModel", "DFlashDraftModel")
MAP, MASK = "d2t", "t2d"
EMBEDDING, OUTPUT = "embed_tokens", "lm_head"
INSTEAD = "take an EAGLE-3 head with one decoder layer"


class FeatureNorm(StrEnum):
    """RMSNorm of the features before they are fused: of each boundary's state, or of all states as one vector."""

    NONE = "none"
    EACH = "each"
    WHOLE = "whole"


@dataclass(frozen=True, slots=True)
class DraftConfig:
    """A draft head with one decoder layer, which reads the token's embedding and a state of the target.

    - `layer`: sizes of the head. Its `vocab_size` is that of the embedding.
    - `root`: what stands before the names of the layer's tensors.
    - `layer_ids`: the ids in the file. `boundaries`: what they mean, see `weft.model.draft_layers`. `names_boundaries`:
      the file says so itself, as Weft's trainer writes it.
    - `feature_size`: the target's hidden size. `is_fused` False: the state of one boundary is read as it is.
    - `is_residual_normed`: the residual stream starts with the normed state.
    - `is_recycled_normed`: the next step reads the state behind the last norm.
    - `vocab_size`: tokens that the head proposes. `has_map`: a tensor names them; otherwise they are the target's.
    - `has_embedding`, `has_output`: own matrices; otherwise those of the target.
    """

    producer: Producer
    layer: ModelConfig
    root: str
    layer_ids: tuple[int, ...]
    boundaries: tuple[int, ...]
    names_boundaries: bool
    feature_size: int
    is_fused: bool
    feature_norm: FeatureNorm
    is_residual_normed: bool
    is_recycled_normed: bool
    has_last_norm: bool
    vocab_size: int
    target_vocab_size: int
    has_map: bool
    has_embedding: bool
    has_output: bool

    @property
    def num_features(self) -> int:
        """States of the target that make up one feature."""
        return len(self.boundaries)

    @property
    def is_output_tied(self) -> bool:
        """True if the output matrix is the embedding of the head."""
        return not self.has_output and self.layer.is_tied and self.has_embedding


def draft_config_of(fields: Fields, stored: Stored, target: ModelConfig) -> DraftConfig:
    """Return the config of a head for this target; `fields` are those of the head's config.json.

    Raises BadCheckpoint naming the file and the field, or the tensor, that does not fit.
    """
    producer = _producer(fields)
    _refuse_other_kinds(fields, stored)
    root = "midlayer." if any(name.startswith("midlayer.") for name in stored) else "layers.0."
    eagle = fields if producer is Producer.SPECULATORS else fields.nested("eagle_config")
    layer = replace(_read_layer(fields, producer, root, stored), layers=(_span(fields, producer, target),))
    is_final = not eagle.boolean("use_aux_hidden_state", True)
    layer_ids = () if is_final else tuple(_layer_ids(fields, eagle))
    said = tuple(eagle.integers("boundaries", []))  # heads of Weft's trainer leave nothing to guess
    config = DraftConfig(
        producer=producer,
        layer=layer,
        root=root,
        layer_ids=layer_ids,
        boundaries=said or default_reading(producer, layer_ids, target.num_layers, is_final),
        names_boundaries=bool(said),
        feature_size=fields.integer("target_hidden_size", layer.hidden_size),
        is_fused=not is_final or any(name.startswith("fc.") for name in stored),
        feature_norm=_feature_norm(fields, eagle),
        is_residual_normed=fields.boolean("norm_before_residual", producer is Producer.SPECULATORS),
        is_recycled_normed=fields.boolean("norm_output") or eagle.boolean("return_hidden_post_norm"),
        has_last_norm=eagle.boolean("use_last_layernorm", True),
        vocab_size=fields.integer("draft_vocab_size", layer.vocab_size),
        target_vocab_size=target.vocab_size,
        has_map=MAP in stored,
        has_embedding=f"{EMBEDDING}.weight" in stored,
        has_output=f"{OUTPUT}.weight" in stored,
    )
    if not all(FINAL <= each <= target.num_layers for each in config.boundaries):
        what = f"{list(said or layer_ids)}, but the target has {target.num_layers} layers; take its own head"
        raise eagle.error("boundaries" if said else "eagle_aux_hidden_state_layer_ids", what)
    _check_sizes(fields, config, target)
    _check_tensors(fields, config, stored)
    return config


def draft_tensors(config: DraftConfig) -> Shapes:
    """Return name and shape of every tensor that is read from the files of a head, but the map of its vocabulary."""
    layer, root, hidden = config.layer, config.root, config.layer.hidden_size
    names = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
    shapes: Shapes = {f"{root}{name}.weight": (hidden,) for name in names}
    shapes |= attention_tensors(layer, root + "self_attn.", layer.layers[0], 2 * hidden)
    shapes |= mlp_tensors(layer, root + "mlp.")
    width = config.num_features * config.feature_size
    if config.is_fused:
        shapes |= linear_tensors(layer, "fc", hidden, width)
    if config.feature_norm is FeatureNorm.EACH:
        shapes |= {f"fc_norm.{index}.weight": (config.feature_size,) for index in range(config.num_features)}
    if config.feature_norm is FeatureNorm.WHOLE:
        shapes["input_norm.weight"] = (width,)
    if config.has_last_norm:
        shapes["norm.weight"] = (hidden,)
    if config.has_embedding:
        shapes[f"{EMBEDDING}.weight"] = (layer.vocab_size, hidden)
    if config.has_output:
        shapes |= linear_tensors(layer, OUTPUT, config.vocab_size, hidden)
    return shapes


def is_draft_head(fields: Fields) -> bool:
    """Return whether a config.json is that of a draft head, supported or not."""
    names = fields.values.get("architectures")
    known = isinstance(names, list) and any(name in LATENT + GROUPED + PARALLEL for name in names)
    return known or "speculators_model_type" in fields.values or "draft_vocab_size" in fields.values


def _producer(fields: Fields) -> Producer:
    kind = fields.values.get("speculators_model_type")
    if kind is not None:
        if kind != "eagle3":
            raise fields.error("speculators_model_type", f"{kind!r} is not supported; {INSTEAD}")
        return Producer.SPECULATORS
    names = fields.strings("architectures")
    name = names[0] if names else ""
    if name in LATENT:
        return Producer.KIMI
    if name in GROUPED:
        eagle = fields.nested("eagle_config").values
        return Producer.MODELOPT if "use_last_layernorm" in eagle else Producer.SPECFORGE
    if name == "LlamaForCausalLM" and "draft_vocab_size" in fields.values:
        return Producer.SAFEAI
    if name in PARALLEL:
        raise fields.error("architectures", f"{name} drafts all tokens at once, which is not supported; {INSTEAD}")
    raise fields.error("architectures", f"{name or names!r} is no EAGLE-3 head; {INSTEAD}")


def _refuse_other_kinds(fields: Fields, stored: Stored) -> None:
    """Raise BadCheckpoint for heads that compute something else."""
    inner, nested = fields.nested("transformer_layer_config"), fields.nested("eagle_config")
    for part in (fields, inner):
        if (count := part.count("num_hidden_layers", 1)) != 1:
            raise part.error("num_hidden_layers", f"{count} is not supported; {INSTEAD}")
    for part in (fields, nested):
        part.refuse("eh_proj_before_attn", "use_mtp_layernorm", "mask_hidden", "ptd_token_id")
        if (steps := part.integer("parallel_draft_step", 1)) != 1:
            raise part.error("parallel_draft_step", f"{steps} is not supported; {INSTEAD}")
    if not nested.boolean("use_input_layernorm_in_first_layer", True):
        raise nested.error("use_input_layernorm_in_first_layer", f"false is not supported; {INSTEAD}")
    if not any(name.endswith("hidden_norm.weight") for name in stored):
        what = "tensor hidden_norm.weight is missing: it is an EAGLE-1 head or none"
        raise BadCheckpoint(f"{fields.path}: {what}; {INSTEAD}")


def _read_layer(fields: Fields, producer: Producer, root: str, stored: Stored) -> ModelConfig:
    inner = fields.nested("transformer_layer_config") if producer is Producer.SPECULATORS else fields
    inner.values["architectures"] = fields.strings("architectures") or ["Eagle3Speculator"]
    set_defaults(inner, num_hidden_layers=1)
    if producer is Producer.KIMI:
        config = replace(read_latent_model(inner), ignored=())
    else:
        has_biases = {"attention_bias": False, "mlp_bias": False}  # SafeAI and SpecForge ignore the fields
        config = read_common(inner.with_values({**inner.values, **has_biases}))
    attention = root + "self_attn."
    return replace(
        config,
        has_qkv_bias=attention + "q_proj.bias" in stored,
        has_output_bias=attention + "o_proj.bias" in stored,
        has_mlp_bias=root + "mlp.down_proj.bias" in stored,
        head_norm=HeadNorm.WEIGHTED if attention + "q_norm.weight" in stored else HeadNorm.NONE,
        quantization=read_quantization(fields),
        logit_scale=fields.number("logit_scale", 1.0),
    )


def _span(fields: Fields, producer: Producer, target: ModelConfig) -> LayerSpec:
    """Return the span of the layer; only speculators trains heads with a window of their own."""
    inner = fields.nested("transformer_layer_config")
    window = read_window(inner, 0) if producer is Producer.SPECULATORS else 0
    own = read_layers(inner, window, [FULL])[0] if window else LayerSpec()
    return own if own.window else draft_layer(target)


def _layer_ids(fields: Fields, eagle: Fields) -> list[int]:
    source = eagle if eagle.values.get("eagle_aux_hidden_state_layer_ids") is not None else fields
    ids = source.integers("eagle_aux_hidden_state_layer_ids", [])
    count = fields.count("num_aux_hidden_states", len(ids) or 3)
    if ids and len(ids) != count:
        raise fields.error("num_aux_hidden_states", f"{count}, but eagle_aux_hidden_state_layer_ids has {len(ids)}")
    if not ids and count != 3:
        raise fields.error("num_aux_hidden_states", f"{count} needs eagle_aux_hidden_state_layer_ids; name the layers")
    return ids


def _feature_norm(fields: Fields, eagle: Fields) -> FeatureNorm:
    is_whole = fields.boolean("norm_before_fc") or eagle.boolean("norm_before_fc")
    if not fields.boolean("fc_norm"):
        return FeatureNorm.WHOLE if is_whole else FeatureNorm.NONE
    if is_whole:
        raise fields.error("fc_norm", "true together with norm_before_fc; set one of the two")
    return FeatureNorm.EACH


def _check_sizes(fields: Fields, config: DraftConfig, target: ModelConfig) -> None:
    layer = config.layer
    if config.feature_size != target.hidden_size:
        field = "target_hidden_size" if fields.values.get("target_hidden_size") else "hidden_size"
        raise fields.error(field, f"{config.feature_size}, but the target has {target.hidden_size}; take its own head")
    if layer.vocab_size < target.vocab_size:
        raise fields.error("vocab_size", f"{layer.vocab_size} is below the target's {target.vocab_size}")
    if config.vocab_size > target.vocab_size:
        raise fields.error("draft_vocab_size", f"{config.vocab_size} is above the target's {target.vocab_size}")
    if config.vocab_size < target.vocab_size and not config.has_map:
        raise BadCheckpoint(f"{fields.path}: tensor {MAP} is missing, which maps {config.vocab_size} draft tokens")
    if not config.is_fused and layer.hidden_size != target.hidden_size:
        raise fields.error("hidden_size", f"{layer.hidden_size}, but without fc it must be {target.hidden_size}")
    for name, is_own in ((EMBEDDING, config.has_embedding), (OUTPUT, config.has_output or config.is_output_tied)):
        if not is_own and layer.hidden_size != target.hidden_size:
            what = f"{layer.hidden_size}, but the target's {name} has {target.hidden_size}; add {name}.weight"
            raise fields.error("hidden_size", what)
    if not (config.has_output or config.is_output_tied) and config.vocab_size != target.vocab_size:
        raise fields.error("draft_vocab_size", f"{config.vocab_size} needs lm_head.weight; add the tensor")


def _check_tensors(fields: Fields, config: DraftConfig, stored: Stored) -> None:
    where, expected = fields.path.parent, draft_tensors(config)
    for name, shape in expected.items():
        if name not in stored:
            raise BadCheckpoint(f"{where}: tensor {name} is missing")
        dtype, found = stored[name]
        if not is_shape(found, shape):
            what = f"has shape {list(found)}, config.json asks for {list(shape)}"
            if name == "fc.weight" and found == (config.layer.hidden_size, 2 * config.layer.hidden_size):
                what += f": it is an EAGLE-1 head; {INSTEAD}"
            raise BadCheckpoint(f"{where}: tensor {name} {what}")
        if dtype not in stored_dtypes(name, expected, config.layer.quantization):
            raise BadCheckpoint(f"{where}: tensor {name} has dtype {dtype}, not a weight's")
    if config.has_map and stored[MAP] != ("I64", (config.vocab_size,)):
        dtype, found = stored[MAP]
        raise BadCheckpoint(f"{where}: tensor {MAP} is {dtype} {list(found)}, expected I64 [{config.vocab_size}]")
    for name in stored:
        if name not in expected and name not in (MAP, MASK) and not is_ignored(name, config.layer):
            raise BadCheckpoint(f"{where}: tensor {name} is not part of a head of {config.producer}")
