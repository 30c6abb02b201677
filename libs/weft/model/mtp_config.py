"""Which tensors of a DeepSeek-V3 or GLM-4.5 checkpoint are the layer that predicts one token more. No torch."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from weft.errors import BadCheckpoint
from weft.model.draft_layers import draft_layer
from weft.model.spec import ModelConfig
from weft.model.tensors import Shapes, layer_tensors, linear_tensors, stored_name

NORMS = ("enorm", "hnorm", "shared_head.norm")
SHARED = ("embed_tokens.weight", "shared_head.head.weight")


@dataclass(frozen=True, slots=True)
class MtpConfig:
    """`layer` is the target's config with this layer alone. `root` stands before the names of the layer's tensors.

    `is_projection_plain`: a quantized checkpoint holds `eh_proj` as a plain matrix.
    """

    layer: ModelConfig
    root: str
    is_projection_plain: bool


def has_mtp_layer(target: ModelConfig, names: Collection[str]) -> bool:
    """Return whether a checkpoint with tensors of these names has such a layer."""
    return _projection(target) in names


def mtp_config_of(target: ModelConfig, names: Collection[str]) -> MtpConfig:
    """Return the config of the layer; `names` are those of all tensors of the checkpoint.

    Raises BadCheckpoint if the checkpoint has no such layer.
    """
    if not has_mtp_layer(target, names):
        what = f"tensor {_projection(target)} is missing: the checkpoint has no layer that drafts; take a draft head"
        raise BadCheckpoint(what)
    root = _root(target)
    spec = replace(draft_layer(target), has_experts=target.experts is not None)
    layer = replace(target, layers=(spec,), ignored=())
    packed = linear_tensors(target, root + "eh_proj", 1, 1)
    is_plain = not {stored_name(name, target) for name in packed} <= set(names)
    return MtpConfig(layer, root, is_plain)


def planned_mtp(target: ModelConfig) -> MtpConfig:
    """Return the config of the layer as config.json alone tells it. Raises BadCheckpoint if the model has none."""
    names = {_projection(target)} if target.ignored and _root(target).startswith(target.ignored) else set[str]()
    return mtp_config_of(target, names)


def mtp_tensors(config: MtpConfig) -> Shapes:
    """Return name and shape of every tensor of the layer that is read."""
    layer, root, hidden = config.layer, config.root, config.layer.hidden_size
    how = replace(layer, quantization=None) if config.is_projection_plain else layer
    shapes: Shapes = {f"{root}{name}.weight": (hidden,) for name in NORMS}
    shapes |= linear_tensors(how, root + "eh_proj", hidden, 2 * hidden)
    shapes |= layer_tensors(layer, root, layer.layers[0])
    return {stored_name(name, layer): shape for name, shape in shapes.items()}


def _root(target: ModelConfig) -> str:
    return f"{target.prefix}model.layers.{target.num_layers}."


def _projection(target: ModelConfig) -> str:
    return stored_name(_root(target) + "eh_proj.weight", target)
