"""Encodes answers of /v1/responses: numbered events of items that open, grow and close, or the whole object."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from weft.errors import Overloaded, WeftError
from weft.request import FinishReason, new_id
from weft_services.gateway.dialects.answers import (
    KEEP_ALIVE,
    ChatChoices,
    CollectedChoice,
    TextLogprobs,
    Usage,
    chat_logprobs,
    event,
    with_obfuscation,
)
from weft_services.gateway.dialects.responses_requests import own_names
from weft_services.gateway.error_body import public_message
from weft_services.gateway.mesh.choice_text import ChoiceUpdate
from weft_services.gateway.mesh.prepare import PreparedRequest
from weft_services.gateway.text.parts import CALLS, OPENED_BY, Part, PartKind, joined

PREFIXES = {PartKind.TEXT: "msg", PartKind.REASONING: "rs", PartKind.CALL: "fc", PartKind.CUSTOM: "ctc"}
# Event name prefixes by kind of item.
EVENTS = {
    PartKind.TEXT: "response.output_text",
    PartKind.REASONING: "response.reasoning_text",
    PartKind.CALL: "response.function_call_arguments",
    PartKind.CUSTOM: "response.custom_tool_call_input",
}


class ResponsesEncoder:
    """Encodes one answer, which has one choice."""

    keep_alive = KEEP_ALIVE

    def __init__(self, prepared: PreparedRequest, fingerprint: str | None) -> None:
        self._answers = ChatChoices(prepared)
        self._answer = self._answers.of(0)
        self._codec = prepared.model.chat_codec
        self._items: list[OutputItem] = []
        self._own_names = own_names(prepared.generation.echo["tools"])
        self._num_events = 0
        self._is_padded = prepared.generation.include_obfuscation
        self.kept_items = prepared.generation.kept_items
        self.num_earlier_generated = prepared.generation.num_earlier_generated
        self.whole: dict[str, Any] | None = None  # the response, once it is complete
        self._logprobs = TextLogprobs(self._codec)
        sampling = prepared.sequences[0].sampling
        self._response: dict[str, Any] = {
            "id": f"resp_{new_id()}",
            "object": "response",
            "created_at": int(time.time()),
            "model": prepared.generation.model,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            **prepared.generation.echo,
            "error": None,
            "incomplete_details": None,
        }  # usage follows at the end: OpenAI's schema does not allow null

    def encode_piece(self, piece: ChoiceUpdate) -> bytes:
        """Encode new text as events of the open item; open another item when the kind changes."""
        out = [self._begin()]  # a whole answer with logprobs yields one entry per token
        for each in self._logprobs.one_by_one(piece):
            parts = joined(self._answer.take(each))
            # Nothing comes out while the reader collects white space, which may be long.
            num_behind = self._answer.num_held + sum(len(part.text) for part in parts) if parts else 0
            for part in parts:
                num_behind -= len(part.text)
                out.append(self._grow(part, num_behind))
        return b"".join(out)

    @property
    def finish_reasons(self) -> Sequence[str]:
        return self._answers.finish_reasons

    def encode_end(self, usage: Usage) -> bytes:
        """Encode the end of the last item and the whole response."""
        status = self._finish(usage)
        closing = self._close(status)
        self.whole = self._snapshot(status)
        return closing + self._event(f"response.{status}", response=self.whole)

    def encode_failure(self, error: WeftError) -> bytes:
        """Encode the end of a failed stream. Its last item stays incomplete."""
        out = self._begin()
        code = "rate_limit_exceeded" if isinstance(error, Overloaded) else "server_error"
        self._response["error"] = {"code": code, "message": public_message(error)}
        if self._items:
            self._items[-1].status = "incomplete"
        return out + self._event("response.failed", response=self._snapshot("failed"))

    def encode_body(self, choices: Sequence[CollectedChoice], usage: Usage) -> bytes:
        """Encode the whole response, equal to the last event of a stream."""
        self.encode_piece(choices[0].whole())
        status = self._finish(usage)
        self._close(status)
        self.whole = self._snapshot(status)
        return orjson.dumps(self.whole)

    def _begin(self) -> bytes:
        if self._num_events:
            return b""
        begun = self._snapshot("in_progress")
        return self._event("response.created", response=begun) + self._event("response.in_progress", response=begun)

    def _grow(self, part: Part, num_behind: int) -> bytes:
        """Append a part to the open item. `num_behind`: characters received after it."""
        out = b""
        if part.kind in CALLS or not self._items or self._items[-1].kind is not kind_of(part):
            out += self._close("completed")
            out += self._open(part)
        if part.kind in CALLS:
            return out
        item, fields = self._items[-1], {}
        if item.kind is PartKind.TEXT:
            positions = self._logprobs.take(part.text, num_behind)
            fields["logprobs"] = chat_logprobs(positions, self._codec)["content"]
            item.logprobs += fields["logprobs"]
        else:
            self._logprobs.skip(num_behind)
        item.add(part.text)
        return out + self._event(f"{item.event}.delta", **self._place(), delta=part.text, **fields)

    def _open(self, part: Part) -> bytes:
        item = OutputItem(part, self._own_names)
        self._items.append(item)
        out = self._event("response.output_item.added", output_index=len(self._items) - 1, item=item.fields())
        if not item.is_call:
            out += self._event("response.content_part.added", **self._place(), part=item.part())
            item.is_opened = True
        return out

    def _close(self, status: str) -> bytes:
        """Close the open item, if any."""
        if not self._items or self._items[-1].status != "in_progress":
            return b""
        item = self._items[-1]
        item.status = status
        out = self._event(f"{item.event}.done", **self._place(), **item.done())
        if not item.is_call:
            out += self._event("response.content_part.done", **self._place(), part=item.part())
        return out + self._event("response.output_item.done", output_index=len(self._items) - 1, item=item.fields())

    def _place(self) -> dict[str, Any]:
        item = self._items[-1]
        place: dict[str, Any] = {"item_id": item.id, "output_index": len(self._items) - 1}
        return place if item.is_call else {**place, "content_index": 0}

    def _finish(self, usage: Usage) -> str:
        """Set the final fields; return the status."""
        usage.reasoning_tokens = self._answers.num_reasoning_tokens
        self._response["usage"] = usage_of(usage)
        if self._answer.finish_reason is FinishReason.LENGTH:
            self._response["incomplete_details"] = {"reason": "max_output_tokens"}
            return "incomplete"
        self._response["completed_at"] = int(time.time())
        return "completed"

    def _snapshot(self, status: str) -> dict[str, Any]:
        return {**self._response, "status": status, "output": [item.fields() for item in self._items]}

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._num_events += 1
        frame = event(kind, sequence_number=self._num_events - 1, **fields)
        return with_obfuscation(frame) if self._is_padded and kind.endswith(".delta") else frame


def usage_of(usage: Usage) -> dict[str, Any]:
    """Return the usage object of this API. Cache writes cost nothing, so their count is 0."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def kind_of(part: Part) -> PartKind:
    """Return the kind of the item that a part belongs to."""
    return OPENED_BY.get(part.kind, part.kind)


class OutputItem:
    """An output item as it grows: a message, thoughts or a call.

    `own_names`: the client's names for functions that the model knows under another name.
    """

    def __init__(self, first: Part, own_names: Mapping[str, dict[str, Any]]) -> None:
        self.kind = kind_of(first)
        self.id = f"{PREFIXES[self.kind]}_{new_id()}"
        self.status = "in_progress"
        self.is_opened = False  # its only content part has begun
        self.logprobs: list[Any] = []  # serialized
        self._texts: list[str] = []
        self._call = {"call_id": first.call_id, **own_names.get(first.text, {"name": first.text})}

    @property
    def text(self) -> str:
        """Its text, thoughts or arguments so far."""
        return "".join(self._texts)

    def add(self, text: str) -> None:
        self._texts.append(text)

    @property
    def is_call(self) -> bool:
        """True for calls, which have no content parts."""
        return self.kind in CALLS

    @property
    def event(self) -> str:
        """The name prefix of its events."""
        return EVENTS[self.kind]

    def fields(self) -> dict[str, Any]:
        """Return the item object in its present state."""
        common = {"id": self.id, "status": self.status}
        content = [self.part()] if self.is_opened else []
        match self.kind:
            case PartKind.CALL:
                return {**common, "type": "function_call", **self._call, "arguments": self.text}
            case PartKind.CUSTOM:
                return {**common, "type": "custom_tool_call", **self._call, "input": self.text}
            case PartKind.REASONING:
                return {**common, "type": "reasoning", "summary": [], "content": content}
            case _:
                return {**common, "type": "message", "role": "assistant", "content": content}

    def part(self) -> dict[str, Any]:
        if self.kind is PartKind.REASONING:
            return {"type": "reasoning_text", "text": self.text}
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": self.logprobs}

    def done(self) -> dict[str, Any]:
        """Return the fields of its done event."""
        if self.kind is PartKind.CALL:
            return {"arguments": self.text, "name": self._call["name"]}
        if self.kind is PartKind.CUSTOM:
            return {"input": self.text}
        return {"text": self.text} | ({"logprobs": self.logprobs} if self.kind is PartKind.TEXT else {})
