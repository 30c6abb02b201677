"""The layer of DeepSeek-V3 and GLM-4.5 checkpoints that predicts one token more, as a draft model.

It is layer n of a checkpoint with n layers: a projection of the normed embedding and the normed state, one decoder
layer of the target's kind, and a norm. It shares the target's embedding and output matrix; files hold copies of both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from weft.model.attention import norm_rows
from weft.model.decoder import DecoderLayer
from weft.model.draft import DraftAngles, DraftRows, DraftTarget
from weft.model.loading import Loader, Tensors
from weft.model.mtp_config import NORMS, SHARED, MtpConfig, mtp_tensors
from weft.model.spec import FINAL
from weft.model.tensors import stored_name
from weft_kernels.linear import linear
from weft_kernels.packed import embedding_rows
from weft_kernels.paged_attention import PagedBatch


class MtpLayer:
    """See `weft.model.draft.DraftModel`. The next draft reads the normed state, as the first one does."""

    def __init__(self, mtp: MtpConfig, weights: Tensors, target: DraftTarget, place: tuple[int, int] = (0, 0)) -> None:
        """`weights` has the tensors of the whole checkpoint. Raises BadCheckpoint for tensors that do not fit."""
        self.config, self.place = mtp.layer, place
        self.boundaries: tuple[int, ...] = (FINAL,)
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
        self.vocabulary: Tensor | None = None
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
