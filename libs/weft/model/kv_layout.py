"""How a model's KV lies inside a block, in numbers: what peers must agree on before blocks move. No torch."""

from __future__ import annotations

from weft.model.config import ModelConfig

# [block][kv_head][layer][k, v][token][dim]: one block is one contiguous run, and so is any range of its heads.
# Latent attention keeps one vector for both: one head, and k only.
KV_LAYOUT = "bhlktd-v1"

ITEM_BYTES = {"float32": 4, "bfloat16": 2}


def block_bytes(config: ModelConfig, dtype: str, block_tokens: int) -> int:
    """Bytes of one block with `block_tokens` tokens of all layers; `dtype` is "float32" or "bfloat16"."""
    num_vectors = config.num_kv_heads * config.num_layers * config.kv_parts * block_tokens
    return num_vectors * config.head_dim * ITEM_BYTES[dtype]
