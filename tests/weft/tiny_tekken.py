"""A whole tekken.json with few tokens."""

from __future__ import annotations

import base64
from typing import Any


def tiny_tekken() -> dict[str, Any]:
    """Return the content of a file with 259 tokens, of which 258 have an id after 4 special tokens."""
    tokens = [*(bytes([byte]) for byte in range(256)), b"ab", b"cd", b"abcd"]
    spelled = [base64.b64encode(token).decode() for token in tokens]
    special = enumerate(("<unk>", "<s>", "</s>"))
    return {
        "config": {"pattern": "\\p{L}+|.", "default_vocab_size": 262, "default_num_special_tokens": 4, "version": "v7"},
        "vocab": [{"rank": rank, "token_bytes": each, "token_str": None} for rank, each in enumerate(spelled)],
        "special_tokens": [{"rank": rank, "token_str": text, "is_control": True} for rank, text in special],
    }
