"""Answers in the dialect of /v1/chat/completions: text, thoughts and tool calls as deltas, or a whole message."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from weft.errors import WeftError
from weft.request import FinishReason
from weft_services.gateway.dialects.answers import Answers
from weft_services.gateway.dialects.frames import KEEP_ALIVE, Choice, Envelope, Usage, error_frame
from weft_services.gateway.dialects.logprobs import chat_logprobs, prompt_logprobs
from weft_services.gateway.mesh.prepare import PreparedRequest
from weft_services.gateway.mesh.sequence_runner import ChoiceUpdate
from weft_services.gateway.text.parts import Part, PartKind, joined

TEXT_FIELDS = {PartKind.TEXT: b"content", PartKind.REASONING: b"reasoning_content"}


class ChatFrames:
    """State of one answer."""

    keep_alive = KEEP_ALIVE

    def __init__(self, prepared: PreparedRequest, fingerprint: str | None) -> None:
        kinds = ("chat.completion", "chat.completion.chunk")
        self.envelope = Envelope("chatcmpl", kinds, prepared, fingerprint)
        self._prepared = prepared
        self._answers = Answers(prepared)
        self._codec = prepared.model.chat_codec
        self._wants_logprobs = prepared.generation.num_logprobs is not None
        self._wants_ids = prepared.generation.return_token_ids
        self._num_begun = 0
        self._prompt_ids = {"prompt_token_ids": prepared.prompts[0].token_ids} if self._wants_ids else None

    def frames(self, piece: ChoiceUpdate) -> bytes:
        """The role when the choice begins, what is new of it, and its end.

        Choices begin in their order, whichever speaks first: OpenAI's client puts a first chunk's in a list by number.
        """
        out = b""
        while self._num_begun <= piece.index:
            role = _choice(self._num_begun, {"role": "assistant", "content": ""})
            out += self.envelope.frame(role, self._prompt_ids)
            self._num_begun += 1
        self.envelope.count(len(piece.token_ids))
        answer = self._answers.of(piece.index)
        parts = answer.take(piece)
        if (self._wants_ids or self._wants_logprobs) and piece.token_ids:
            # logprobs and ids are those of all that came together, and are told once
            first = _choice(piece.index, delta_of(parts[0]) if parts else {"content": ""})
            out += self.envelope.frame(self._with_details(first, piece))
            parts = parts[1:]
        for part in parts:
            out += self._frame(piece.index, part)
        if piece.finish_reason is not None:
            out += self.envelope.frame(_choice(piece.index, {}, answer.finish_reason))
        return out

    @property
    def finish_reasons(self) -> Sequence[str]:
        """Of the choices that have ended."""
        return self._answers.finish_reasons

    def end(self, usage: Usage) -> bytes:
        """The last frames of a stream."""
        usage.reasoning_tokens = self._answers.num_reasoning_tokens
        return self.envelope.end(usage)

    def failure(self, error: WeftError) -> bytes:
        """The last frames of a stream that failed."""
        return error_frame(error)

    def body(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        """The whole answer."""
        rendered = []
        for index, choice in enumerate(choices):
            answer = self._answers.of(index)
            message = message_of(answer.take(choice.whole()))
            entry = {"index": index, "message": message, "logprobs": None, "finish_reason": answer.finish_reason}
            rendered.append(self._with_details(entry, choice))
        usage.reasoning_tokens = self._answers.num_reasoning_tokens
        return self.envelope.body(rendered, usage, {**(self._prompt_ids or {}), **self._of_prompt(choices[0])})

    def _of_prompt(self, choice: Choice) -> dict[str, Any]:
        """Its logprobs, in vLLM's words; the first choice has them for all."""
        wanted, ids = self._prepared.generation.num_prompt_logprobs, self._prepared.prompts[0].token_ids
        if wanted is None:
            return {}
        return {"prompt_logprobs": prompt_logprobs(ids, choice.prompt_logprobs, wanted, self._codec)}

    def _frame(self, index: int, part: Part) -> bytes:
        if (field := TEXT_FIELDS.get(part.kind)) is not None:
            return self.envelope.text_frame(index, field, part.text)
        return self.envelope.frame(_choice(index, delta_of(part)))

    def _with_details(self, entry: dict[str, Any], source: ChoiceUpdate | Choice) -> dict[str, Any]:
        if self._wants_logprobs:
            entry["logprobs"] = chat_logprobs(source.logprobs, self._codec)
        if self._wants_ids:
            entry["token_ids"] = source.token_ids
        return entry


def delta_of(part: Part) -> dict[str, Any]:
    """Id, type and name come once for a call, with its index alone after that."""
    match part.kind:
        case PartKind.TEXT:
            return {"content": part.text}
        case PartKind.REASONING:
            return {"reasoning_content": part.text}
        case PartKind.CALL:
            function = {"name": part.text, "arguments": ""}
            return {"tool_calls": [{"index": part.call, "id": part.call_id, "type": "function", "function": function}]}
        case PartKind.ARGUMENTS:
            return {"tool_calls": [{"index": part.call, "function": {"arguments": part.text}}]}
        case PartKind.CUSTOM:
            custom = {"name": part.text, "input": ""}
            return {"tool_calls": [{"index": part.call, "id": part.call_id, "type": "custom", "custom": custom}]}
        case PartKind.INPUT:
            return {"tool_calls": [{"index": part.call, "custom": {"input": part.text}}]}


def message_of(parts: Sequence[Part]) -> dict[str, Any]:
    """An assistant's message, as it would be sent back in a conversation."""
    text = "".join(part.text for part in parts if part.kind is PartKind.TEXT)
    reasoning = "".join(part.text for part in parts if part.kind is PartKind.REASONING)
    calls = calls_of(parts)
    message: dict[str, Any] = {"role": "assistant", "content": None if calls and not text else text, "refusal": None}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = calls
    return message


def calls_of(parts: Sequence[Part]) -> list[dict[str, Any]]:
    """The tool calls, whole."""
    calls: list[dict[str, Any]] = []
    for part in joined(parts):
        if part.kind is PartKind.CALL:
            function = {"name": part.text, "arguments": ""}
            calls.append({"id": part.call_id, "type": "function", "function": function})
        elif part.kind is PartKind.ARGUMENTS:
            calls[-1]["function"]["arguments"] += part.text  # joined: once a call
        elif part.kind is PartKind.CUSTOM:
            calls.append({"id": part.call_id, "type": "custom", "custom": {"name": part.text, "input": ""}})
        elif part.kind is PartKind.INPUT:
            calls[-1]["custom"]["input"] += part.text
    return calls


def _choice(index: int, delta: dict[str, Any], finish_reason: FinishReason | None = None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
