"""Token logprobs in OpenAI's two shapes: chat's list of entries, completions' four parallel lists."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from weft.request import PositionLogprobs, TokenLogprob
from weft_services.gateway.model import Codec

LOWEST = -9999.0  # JSON has no -inf


def chat_logprobs(positions: Sequence[PositionLogprobs], codec: Codec) -> dict[str, Any]:
    """The `logprobs` object of a chat choice."""
    content = [
        {**_entry(position.chosen, codec), "top_logprobs": [_entry(entry, codec) for entry in position.top]}
        for position in positions
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(positions: Sequence[PositionLogprobs], codec: Codec, offset: int) -> tuple[dict[str, Any], int]:
    """The `logprobs` object of a completion choice whose text so far has `offset` characters, and the new offset."""
    tokens, chances, tops, offsets = [], [], [], []
    for position in positions:
        text = codec.token_text(position.chosen.token_id)
        tokens.append(text)
        chances.append(_bounded(position.chosen))
        entries = (position.chosen, *position.top)
        tops.append({codec.token_text(entry.token_id): _bounded(entry) for entry in entries})
        offsets.append(offset)
        offset += len(text)
    return {"tokens": tokens, "token_logprobs": chances, "top_logprobs": tops, "text_offset": offsets}, offset


def _bounded(entry: TokenLogprob) -> float:
    return max(entry.logprob, LOWEST)


def _entry(entry: TokenLogprob, codec: Codec) -> dict[str, Any]:
    text = codec.token_text(entry.token_id)
    return {"token": text, "logprob": _bounded(entry), "bytes": list(codec.token_bytes(entry.token_id))}
