"""The layer of DeepSeek-V3 and GLM-4.5 checkpoints that predicts one token more, as a draft model.

It is layer n of a checkpoint with n layers: a projection of the normed embedding and the normed state, one decoder
layer of the target's kind, and a norm. It shares the target's embedding and output matrix; files hold copies of both.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from weft.errors import BadCheckpoint
from weft.model.attention import norm_rows
from weft.model.decoder import DecoderLayer
from weft.model.draft import DraftAngles, DraftRows, DraftTarget
from weft.model.draft_layers import draft_layer
from weft.model.loading import Loader, Tensors
from weft.model.spec import FINAL, ModelConfig
from weft.model.tensors import Shapes, layer_tensors, linear_tensors, stored_name
from weft_kernels.linear import linear
from weft_kernels.packed import embedding_rows
from weft_kernels.paged_attention import PagedBatch

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


def mtp_config_of(target: ModelConfig, names: Collection[str]) -> MtpConfig:
    """Return the config of the layer; `names` are those of all tensors of the checkpoint.

    Raises BadCheckpoint if the checkpoint has no such layer.
    """
    root = f"{target.prefix}model.layers.{target.num_layers}."
    projection = stored_name(root + "eh_proj.weight", target)
    if projection not in names:
        raise BadCheckpoint(
            f"tensor {projection} is missing: the checkpoint has no layer that drafts; take a draft head"
        )
    spec = replace(draft_layer(target), has_experts=target.experts is not None)
    layer = replace(target, layers=(spec,), ignored=())
    packed = linear_tensors(target, root + "eh_proj", 1, 1)
    is_plain = not {stored_name(name, target) for name in packed} <= set(names)
    return MtpConfig(layer, root, is_plain)


def mtp_tensors(config: MtpConfig) -> Shapes:
    """Return name and shape of every tensor of the layer that is read."""
    layer, root, hidden = config.layer, config.root, config.layer.hidden_size
    how = replace(layer, quantization=None) if config.is_projection_plain else layer
    shapes: Shapes = {f"{root}{name}.weight": (hidden,) for name in NORMS}
    shapes |= linear_tensors(how, root + "eh_proj", hidden, 2 * hidden)
    shapes |= layer_tensors(layer, root, layer.layers[0])
    return {stored_name(name, layer): shape for name, shape in shapes.items()}


class MtpLayer:
    """See `weft.model.draft.DraftModel`. The next draft reads the normed state, as the first one does."""

    def __init__(self, mtp: MtpConfig, weights: Tensors, target: DraftTarget, place: tuple[int, int] = (0, 0)) -> None:
        """`weights` has the tensors of the whole checkpoint. Raises BadCheckpoint for tensors that do not fit."""
        self.config, self.boundaries, self.place = mtp.layer, (FINAL,), place
        plain = replace(mtp, layer=replace(mtp.layer, quantization=None))
        expected = mtp_tensors(mtp), mtp_tensors(plain)
        root = stored_name(mtp.root, mtp.layer)
        shared = {root + name for name in SHARED}
        own = {name: each for name, each in weights.items() if name.startswith(root) and name not in shared}
        loader = Loader(mtp.layer, own, target.dtype, target.device, target.is_resident, expected=expected)
        self.embedding_norm, self.state_norm, self.norm = (loader.norm(mtp.root + name) for name in NORMS)
        self.projection = loader.linear(mtp.root + "eh_proj")
        self.layer = DecoderLayer(mtp.layer, 0, loader, mtp.root, place)
        loader.check_all_read()
        self.packed = tuple(loader.packed)
        self.embedding, self.output = target.embedding, target.output
        self._angles = DraftAngles(self.config, target, place[0])

    def fuse(self, features: Tensor) -> Tensor:
        return features[:, 0]

    def forward(self, state: Tensor, rows: DraftRows, batches: Sequence[PagedBatch]) -> Tensor:
        eps = self.config.rms_norm_eps
        embedded = embedding_rows(self.embedding, rows.token_ids).to(state.dtype)
        x = torch.cat((norm_rows(embedded, self.embedding_norm, eps), norm_rows(state, self.state_norm, eps)), dim=-1)
        stream, pending = self.layer.forward(linear(x, self.projection), None, self._angles.inputs(rows, batches))
        return norm_rows(stream if pending is None else stream + pending, self.norm, eps)

    def logits(self, state: Tensor) -> Tensor:
        return linear(state, self.output).float()

    def target_ids(self, draft_ids: Tensor) -> Tensor:
        return draft_ids
