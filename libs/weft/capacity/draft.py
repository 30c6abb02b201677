"""Bytes of a draft model beside its KV, which lies in the target's pages. No torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from weft.capacity.footprint import ITEM_BYTES
from weft.model.draft_config import DraftConfig, draft_tensors
from weft.model.mtp_config import MtpConfig, mtp_tensors
from weft.model.spec import ModelConfig
from weft.model.tensors import Shapes
from weft.options import MAX_DRAFT_TOKENS

# A step samples at most this many rows, or one of each sequence: memory for their logits was measured or is small.
MIN_SAMPLED_ROWS = 64


def feature_rows(block_tokens: int, max_drafts: int = MAX_DRAFT_TOKENS) -> int:
    """Return the features that each sequence keeps: of a block's tokens, of a step's rows, and of the token before."""
    return block_tokens + max_drafts + 2


def step_rows(num_prompt_tokens: int, max_seqs: int) -> int:
    """Return the most rows of a step: prompts, sequences that decode and their drafts, and repeated tokens."""
    return num_prompt_tokens + max(max_seqs, MIN_SAMPLED_ROWS) + max_seqs


@dataclass(frozen=True, slots=True)
class DraftSize:
    """Sizes of a draft model that is computed in one dtype, unpacked. `layer`: its config.

    `num_features`: states of the target, each of its hidden size, that one token's feature consists of.
    """

    layer: ModelConfig
    weight_bytes: int
    num_features: int
    dtype: str

    def feature_bytes(self, target: ModelConfig, num_rows: int) -> int:
        """Return the bytes of the features of this many tokens."""
        return num_rows * self.num_features * target.hidden_size * ITEM_BYTES[self.dtype]


def draft_size(config: DraftConfig | MtpConfig, dtype: str, is_cpu: bool = False) -> DraftSize:
    """Return the sizes of a draft model. A CPU keeps bfloat16 matrices as they are, in any dtype of computation."""
    layer = config.layer
    plain = replace(layer, quantization=None)
    if isinstance(config, DraftConfig):
        shapes: Shapes = draft_tensors(replace(config, layer=plain))
        num_features = config.num_features
    else:
        shapes, num_features = mtp_tensors(replace(config, layer=plain)), 1
    is_kept = is_cpu and layer.dtype == "bfloat16" and layer.quantization is None
    matrix = ITEM_BYTES["bfloat16" if is_kept else dtype]
    total = sum(math.prod(shape) * (matrix if len(shape) > 1 else ITEM_BYTES[dtype]) for shape in shapes.values())
    return DraftSize(layer, total, num_features, dtype)
