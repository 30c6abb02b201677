"""Output items of the Responses API as they grow: a message, thoughts, or a call. No events, no order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weft.ids import new_id
from weft_services.gateway.text.parts import CALLS, OPENED_BY, Part, PartKind

PREFIXES = {PartKind.TEXT: "msg", PartKind.REASONING: "rs", PartKind.CALL: "fc", PartKind.CUSTOM: "ctc"}
# what the events of its growth are called
EVENTS = {
    PartKind.TEXT: "response.output_text",
    PartKind.REASONING: "response.reasoning_text",
    PartKind.CALL: "response.function_call_arguments",
    PartKind.CUSTOM: "response.custom_tool_call_input",
}


def kind_of(part: Part) -> PartKind:
    """Of the item that it belongs to."""
    return OPENED_BY.get(part.kind, part.kind)


class OutputItem:
    """Opened by its first part.

    `own_names`: what clients call the functions that have another name for the model.
    """

    def __init__(self, first: Part, own_names: Mapping[str, dict[str, Any]]) -> None:
        self.kind = kind_of(first)
        self.id = f"{PREFIXES[self.kind]}_{new_id()}"
        self.status = "in_progress"
        self.is_opened = False  # its one content part has begun
        self.logprobs: list[Any] = []  # as JSON
        self._texts: list[str] = []
        self._call = {"call_id": first.call_id, **own_names.get(first.text, {"name": first.text})}

    @property
    def text(self) -> str:
        """What there is of its text, thoughts or arguments."""
        return "".join(self._texts)

    def add(self, text: str) -> None:
        """More of it."""
        self._texts.append(text)

    @property
    def is_call(self) -> bool:
        """A call has no content parts."""
        return self.kind in CALLS

    @property
    def event(self) -> str:
        """What its growth is called."""
        return EVENTS[self.kind]

    def fields(self) -> dict[str, Any]:
        """The item as it stands."""
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
        """Its content part."""
        if self.kind is PartKind.REASONING:
            return {"type": "reasoning_text", "text": self.text}
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": self.logprobs}

    def done(self) -> dict[str, Any]:
        """What the event of its end says."""
        if self.kind is PartKind.CALL:
            return {"arguments": self.text, "name": self._call["name"]}
        if self.kind is PartKind.CUSTOM:
            return {"input": self.text}
        return {"text": self.text} | ({"logprobs": self.logprobs} if self.kind is PartKind.TEXT else {})
