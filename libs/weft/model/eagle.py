"""EAGLE-3 draft heads: one decoder layer over the embedding of a token and a fused state of the target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from weft.model.attention import GroupedAttention, norm_rows
from weft.model.decoder import Mlp
from weft.model.draft import DraftAngles, DraftRows, DraftTarget, vocabulary_map
from weft.model.draft_config import EMBEDDING, MAP, MASK, OUTPUT, DraftConfig, FeatureNorm, draft_tensors
from weft.model.latent import LatentAttention
from weft.model.loading import Loader, Tensors
from weft_kernels.linear import linear
from weft_kernels.packed import embedding_rows
from weft_kernels.paged_attention import PagedBatch
from weft_kernels.rms_norm import add_rms_norm


class EagleHead:
    """See `weft.model.draft.DraftModel`. Attention reads the normed embedding and the normed state side by side."""

    def __init__(
        self, draft: DraftConfig, weights: Tensors, target: DraftTarget, place: tuple[int, int] = (0, 0)
    ) -> None:
        """`weights` has the tensors of the head's files. Raises BadCheckpoint for tensors that do not fit `draft`."""
        self.draft, self.config, self.boundaries, self.place = draft, draft.layer, draft.boundaries, place
        own = {name: tensor for name, tensor in weights.items() if name not in (MAP, MASK)}
        expected = draft_tensors(draft), draft_tensors(replace(draft, layer=replace(draft.layer, quantization=None)))
        loader = Loader(draft.layer, own, target.dtype, target.device, target.is_resident, expected=expected)
        self._load_layer(loader, place)
        self.fusion = loader.linear("fc") if draft.is_fused else None
        self.feature_norms = self._feature_norms(loader)
        self.norm = loader.norm("norm") if draft.has_last_norm else None
        self.embedding = loader.table(f"{EMBEDDING}.weight") if draft.has_embedding else target.embedding
        if draft.is_output_tied:
            self.output = loader.pack(self.embedding)
        else:
            self.output = loader.linear(OUTPUT) if draft.has_output else target.output
        loader.check_all_read()
        self.packed = tuple(loader.packed)
        offsets = weights[MAP].to(target.device) if draft.has_map else None
        ids = None if offsets is None else vocabulary_map(offsets, draft.target_vocab_size)
        self.vocabulary = None if ids is None else ids.int()
        self._angles = DraftAngles(self.config, target, place[0])

    def fuse(self, features: Tensor) -> Tensor:
        parts, eps = features, self.config.rms_norm_eps
        if self.draft.feature_norm is FeatureNorm.EACH:
            parts = torch.stack([norm_rows(parts[:, i], norm, eps) for i, norm in enumerate(self.feature_norms)], dim=1)
        wide = parts.flatten(1)
        if self.draft.feature_norm is FeatureNorm.WHOLE:
            wide = norm_rows(wide, self.feature_norms[0], eps)
        return wide if self.fusion is None else linear(wide, self.fusion)

    def forward(self, state: Tensor, rows: DraftRows, batches: Sequence[PagedBatch]) -> Tensor:
        eps = self.config.rms_norm_eps
        embedded = embedding_rows(self.embedding, rows.token_ids).to(state.dtype)
        normed = norm_rows(state, self.hidden_norm, eps)
        x = torch.cat((norm_rows(embedded, self.input_norm, eps), normed), dim=-1)
        attended = self.attention.forward(x, self._angles.inputs(rows, batches))
        stream, x = add_rms_norm(attended, normed if self.draft.is_residual_normed else state, self.mlp_norm, eps)
        out = stream + self.mlp.forward(x)
        return norm_rows(out, self.norm, eps) if self.norm is not None and self.draft.is_recycled_normed else out

    def logits(self, state: Tensor) -> Tensor:
        if self.norm is not None and not self.draft.is_recycled_normed:
            state = norm_rows(state, self.norm, self.config.rms_norm_eps)
        logits = linear(state, self.output).float()
        return logits if self.config.logit_scale == 1.0 else logits * self.config.logit_scale

    def target_ids(self, draft_ids: Tensor) -> Tensor:
        return draft_ids if self.vocabulary is None else self.vocabulary[draft_ids].long()

    def _load_layer(self, loader: Loader, place: tuple[int, int]) -> None:
        root, config = self.draft.root, self.config
        names = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
        self.input_norm, self.hidden_norm, self.mlp_norm = (loader.norm(root + name) for name in names)
        attention = LatentAttention if config.latent else GroupedAttention
        self.attention: LatentAttention | GroupedAttention = attention(config, 0, root + "self_attn.", loader, place)
        self.mlp = Mlp(root + "mlp.", loader, config.has_mlp_bias)

    def _feature_norms(self, loader: Loader) -> list[Tensor]:
        if self.draft.feature_norm is FeatureNorm.EACH:
            return [loader.norm(f"fc_norm.{index}") for index in range(self.draft.num_features)]
        return [loader.norm("input_norm")] if self.draft.feature_norm is FeatureNorm.WHOLE else []
