"""Encodes answers of Anthropic's /v1/messages: named events of content blocks, or a whole message."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from weft.errors import WeftError
from weft.request import FinishReason, new_id
from weft_services.gateway.dialects.answers import ChatChoices, CollectedChoice, Usage, event
from weft_services.gateway.error_body import public_message, status_of
from weft_services.gateway.mesh.choice_text import ChoiceUpdate
from weft_services.gateway.mesh.prepare import PreparedRequest, TooLong
from weft_services.gateway.text.parts import Part, PartKind, joined

ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "request_too_large",
    415: "invalid_request_error",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
# Thoughts are not signed here, but clients need a signature to send them back.
SIGNATURE = {"type": "signature_delta", "signature": ""}
REASONS = {
    FinishReason.STOP: "end_turn",
    FinishReason.LENGTH: "max_tokens",
    FinishReason.TOOL_CALLS: "tool_use",
}


def anthropic_error_body(error: WeftError) -> bytes:
    """Return the error body of Anthropic's API."""
    return orjson.dumps({"type": "error", "error": _error(error)})


class MessagesEncoder:
    """Encodes one answer, which has one choice."""

    keep_alive = event("ping")

    def __init__(self, prepared: PreparedRequest, fingerprint: str | None) -> None:
        self._answers = ChatChoices(prepared)
        self._answer = self._answers.of(0)
        self._num_prompt_tokens = prepared.num_prompt_tokens
        self._message: dict[str, Any] = {
            "id": f"msg_{new_id()}",
            "type": "message",
            "role": "assistant",
            "model": prepared.generation.model,
        }
        self._is_begun = False
        self._open: PartKind | None = None
        self._index = -1
        self._stop: str | None = None

    def encode_piece(self, piece: ChoiceUpdate) -> bytes:
        """Encode new text as deltas of the open block; open a block when the kind changes."""
        out = b"" if self._is_begun else self._begin()
        self._is_begun = True
        self._stop = piece.stop
        for part in self._answer.take(piece):
            out += self._delta(part)
        return out

    @property
    def finish_reasons(self) -> Sequence[str]:
        return self._answers.finish_reasons

    def encode_end(self, usage: Usage) -> bytes:
        """Encode the end of the last block, the stop reason and the usage."""
        out = self._close()
        reason, stop = self._reason()
        usage.reasoning_tokens = self._answers.num_reasoning_tokens
        out += event("message_delta", delta={"stop_reason": reason, "stop_sequence": stop}, usage=usage_of(usage))
        return out + event("message_stop")

    def encode_failure(self, error: WeftError) -> bytes:
        """Encode an error event for a stream that has begun."""
        return event("error", error=_error(error))

    def encode_body(self, choices: Sequence[CollectedChoice], usage: Usage) -> bytes:
        piece = choices[0].whole()
        self._stop = piece.stop
        content = blocks_of(self._answer.take(piece))
        reason, stop = self._reason()
        usage.reasoning_tokens = self._answers.num_reasoning_tokens
        ends = {"stop_reason": reason, "stop_sequence": stop, "usage": usage_of(usage)}
        return orjson.dumps({**self._message, "content": content, **ends})

    def _begin(self) -> bytes:
        # The cached tokens are known at the end; message_delta corrects them.
        usage = usage_of(Usage(self._num_prompt_tokens, 0, 0))
        fields: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        return event("message_start", message={**self._message, **fields})

    def _delta(self, part: Part) -> bytes:
        out = b""
        kind = PartKind.CALL if part.kind is PartKind.ARGUMENTS else part.kind
        if part.kind is PartKind.CALL or kind is not self._open:
            out += self._close()
            self._open, self._index = kind, self._index + 1
            out += event("content_block_start", index=self._index, content_block=_empty_block(part))
        if part.kind is not PartKind.CALL:
            out += event("content_block_delta", index=self._index, delta=_delta_of(part))
        return out

    def _close(self) -> bytes:
        if self._open is None:
            return b""
        signed = b""
        if self._open is PartKind.REASONING:  # clients read the signature from this event only
            signed = event("content_block_delta", index=self._index, delta=SIGNATURE)
        self._open = None
        return signed + event("content_block_stop", index=self._index)

    def _reason(self) -> tuple[str, str | None]:
        reason = self._answer.finish_reason or FinishReason.STOP
        is_told = reason is FinishReason.STOP and self._stop is not None
        return "stop_sequence" if is_told else REASONS[reason], self._stop if is_told else None


def usage_of(usage: Usage) -> dict[str, Any]:
    """Return Anthropic's usage object. Its input tokens exclude cached tokens."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_read_input_tokens": usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens},
    }


def blocks_of(parts: Sequence[Part]) -> list[dict[str, Any]]:
    """Return the complete content blocks of an answer."""
    blocks: list[dict[str, Any]] = []
    for part in joined(parts):
        if part.kind is PartKind.ARGUMENTS:
            blocks[-1]["input"] = _object(part.text)
            continue
        block = _empty_block(part)
        if part.kind is not PartKind.CALL:
            block[block["type"]] = part.text
        blocks.append(block)
    return blocks


def _object(text: str) -> orjson.Fragment | dict[str, str]:
    """Return the arguments as written, with numbers of any size. Truncated arguments become their raw text."""
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError:
        return {"raw": text}
    return orjson.Fragment(text) if isinstance(value, dict) else {"raw": text}


def _empty_block(part: Part) -> dict[str, Any]:
    match part.kind:
        case PartKind.REASONING:
            return {"type": "thinking", "thinking": "", "signature": SIGNATURE["signature"]}
        case PartKind.CALL:
            return {"type": "tool_use", "id": part.call_id, "name": part.text, "input": {}}
        case _:
            return {"type": "text", "text": ""}


def _delta_of(part: Part) -> dict[str, Any]:
    match part.kind:
        case PartKind.REASONING:
            return {"type": "thinking_delta", "thinking": part.text}
        case PartKind.ARGUMENTS:
            return {"type": "input_json_delta", "partial_json": part.text}
        case _:
            return {"type": "text_delta", "text": part.text}


def _error(error: WeftError) -> dict[str, str]:
    message = _too_long(error) if isinstance(error, TooLong) else public_message(error)
    return {"type": ERROR_TYPES.get(status_of(error), "api_error"), "message": message}


def _too_long(error: TooLong) -> str:
    """Return Anthropic's message. Agents recognize it and summarize the conversation or lower `max_tokens`."""
    if error.max_tokens is None:
        return f"prompt is too long: {error.size} > {error.limit - 1} maximum"
    sums = f"{error.size} + {error.max_tokens} > {error.limit}"
    advice = "decrease input length or `max_tokens` and try again"
    return f"input length and `max_tokens` exceed context limit: {sums}, {advice}"
