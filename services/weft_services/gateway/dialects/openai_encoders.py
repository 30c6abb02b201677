"""Encoders for /v1/chat/completions and /v1/completions: SSE frames for streams, whole bodies otherwise."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import orjson

from weft.errors import WeftError
from weft.request import FinishReason, PromptLogprobs, new_id
from weft_services.gateway.dialects.answers import (
    DONE,
    KEEP_ALIVE,
    ChatChoices,
    CollectedChoice,
    CompletionLogprobs,
    Usage,
    chat_logprobs,
    error_frame,
    prompt_logprobs,
    with_obfuscation,
)
from weft_services.gateway.mesh.choice_text import ChoiceUpdate
from weft_services.gateway.mesh.prepare import PreparedRequest
from weft_services.gateway.text.parts import Part, PartKind, joined

# Marks a chunk with draft tokens, for a client that asks for stream_options.include_draft_tokens.
DRAFT = {"is_draft": True}
TEXT_FIELDS = {PartKind.TEXT: b"content", PartKind.REASONING: b"reasoning_content"}


class Envelope:
    """Serializes the fields that all frames and the body of one answer share, once."""

    def __init__(self, prefix: str, kinds: tuple[str, str], prepared: PreparedRequest, fingerprint: str | None) -> None:
        """`kinds`: object names of a whole body and of a stream's chunk."""
        self._common = {
            "id": f"{prefix}-{new_id()}",
            "created": int(time.time()),
            "model": prepared.generation.model,
            "system_fingerprint": fingerprint,
        }
        self._body_kind, chunk_kind = kinds
        chunk = orjson.dumps({**self._common, "object": chunk_kind})
        self._head = b"data: " + chunk[:-1] + b',"choices":['
        self._ends_with_usage = prepared.generation.include_usage
        self._usage = b',"usage":null' if self._ends_with_usage else b""
        self._running = Usage(prepared.num_prompt_tokens, 0, 0) if prepared.generation.continuous_usage else None
        self._is_padded = prepared.generation.include_obfuscation
        self._tail = b'},"logprobs":null,"finish_reason":null}]' + self._usage + b"}\n\n"

    def count(self, num_tokens: int) -> None:
        """Add the running usage to later chunks if the client asks for it. The cached tokens follow at the end."""
        if self._running is not None:
            self._running.completion_tokens += num_tokens
            counts = self._running.fields()
            running = {name: counts[name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")}
            self._usage = b',"usage":' + orjson.dumps(running)

    def frame(self, choice: dict[str, Any], extra: dict[str, Any] | None = None) -> bytes:
        """Encode a chunk with one choice. `extra`: more fields next to `choices`."""
        more = b"," + orjson.dumps(extra)[1:-1] if extra else b""
        frame = self._head + orjson.dumps(choice) + b"]" + more + self._usage + b"}\n\n"
        return with_obfuscation(frame) if self._is_padded else frame

    def text_frame(self, index: int, field: bytes, text: str) -> bytes:
        """Encode a chunk that only adds text.

        Nearly all chunks are of this kind, so it is built from preserialized parts. The result equals `frame`.
        """
        if self._running is not None:
            return self.frame(
                {"index": index, "delta": {field.decode(): text}, "logprobs": None, "finish_reason": None}
            )
        frame = b'%b{"index":%d,"delta":{"%b":%b%b' % (self._head, index, field, orjson.dumps(text), self._tail)
        return with_obfuscation(frame) if self._is_padded else frame

    def encode_end(self, usage: Usage) -> bytes:
        """Encode [DONE], after the usage chunk if stream_options.include_usage asks for it."""
        if not self._ends_with_usage:
            return DONE
        return self._head + b'],"usage":' + orjson.dumps(usage.fields()) + b"}\n\n" + DONE

    def encode_body(self, choices: list[dict[str, Any]], usage: Usage, extra: dict[str, Any] | None = None) -> bytes:
        kind = {"object": self._body_kind}
        return orjson.dumps({**self._common, **kind, "choices": choices, "usage": usage.fields(), **(extra or {})})


class CompletionEncoder:
    """Encodes the choices of one /v1/completions answer."""

    keep_alive = KEEP_ALIVE
    finish_reasons: Sequence[str] = ()  # clients get the workers' own

    def __init__(self, prepared: PreparedRequest, fingerprint: str | None) -> None:
        self.envelope = Envelope("cmpl", ("text_completion", "text_completion"), prepared, fingerprint)
        self._codec = prepared.model.codec
        self._prepared = prepared
        self._wants_logprobs = prepared.generation.num_logprobs is not None
        self._wants_ids = prepared.generation.return_token_ids
        # By choice, from its first frame on; None if the client wants no logprobs.
        self._logprobs: dict[int, CompletionLogprobs | None] = {}

    def encode_piece(self, piece: ChoiceUpdate) -> bytes:
        """Encode what is new in the choice, and its end."""
        self.envelope.count(len(piece.token_ids))
        has_details = bool(piece.token_ids) and (self._wants_ids or self._wants_logprobs)
        if not (piece.text or has_details or piece.finish_reason):
            return b""
        choice = self._choice(piece.index, piece.text, piece, piece.prompt_logprobs)
        return self.envelope.frame(choice | DRAFT if piece.is_draft else choice)

    def encode_end(self, usage: Usage) -> bytes:
        return self.envelope.encode_end(usage)

    def encode_failure(self, error: WeftError) -> bytes:
        return error_frame(error)

    def encode_body(self, choices: Sequence[CollectedChoice], usage: Usage) -> bytes:
        """Encode the whole answer: the `n` best candidates of each prompt, with the prompt's logprobs."""
        asked = self._prepared.generation
        rendered: list[dict[str, Any]] = []
        for first in range(0, len(choices), asked.num_candidates):
            candidates = choices[first : first + asked.num_candidates]
            scores = candidates[0].prompt_logprobs
            best = candidates
            if asked.num_candidates > asked.n:
                best = sorted(candidates, key=lambda choice: choice.mean_logprob, reverse=True)[: asked.n]
            for choice in best:
                entry = self._choice(choice.index, "".join(choice.texts), choice, scores)
                rendered.append(entry | {"index": len(rendered)})
        return self.envelope.encode_body(rendered, usage)

    def _choice(
        self, index: int, text: str, source: ChoiceUpdate | CollectedChoice, scores: Sequence[PromptLogprobs]
    ) -> dict[str, Any]:
        """Return a choice object. `scores`: prompt logprobs, used in the choice's first frame."""
        asked, prompt = self._prepared.generation, self._prepared.prompts[self._prepared.sequences[index].prompt]
        entry: dict[str, Any] = {"index": index, "text": text, "logprobs": None, "finish_reason": source.finish_reason}
        if is_first := index not in self._logprobs:
            self._logprobs[index] = CompletionLogprobs(self._codec, prompt.context) if self._wants_logprobs else None
        logprobs = self._logprobs[index]
        if is_first and asked.repeats_prompt:
            entry["text"] = prompt.text + text
            if logprobs is not None and asked.num_logprobs is not None:
                logprobs.repeat(prompt.text, prompt.token_ids, scores, asked.num_logprobs)
        if logprobs is not None:
            entry["logprobs"] = logprobs.take(source.logprobs)
        if is_first and asked.num_prompt_logprobs is not None:
            wanted = asked.num_prompt_logprobs
            entry["prompt_logprobs"] = prompt_logprobs(prompt.token_ids, scores, wanted, self._codec)
        if self._wants_ids:
            entry["token_ids"] = source.token_ids
            if is_first:
                entry["prompt_token_ids"] = prompt.token_ids
        return entry


class ChatEncoder:
    """Encodes the choices of one /v1/chat/completions answer."""

    keep_alive = KEEP_ALIVE

    def __init__(self, prepared: PreparedRequest, fingerprint: str | None) -> None:
        kinds = ("chat.completion", "chat.completion.chunk")
        self.envelope = Envelope("chatcmpl", kinds, prepared, fingerprint)
        self._prepared = prepared
        self._answers = ChatChoices(prepared)
        self._codec = prepared.model.chat_codec
        self._wants_logprobs = prepared.generation.num_logprobs is not None
        self._wants_ids = prepared.generation.return_token_ids
        self._num_begun = 0
        self._prompt_ids = {"prompt_token_ids": prepared.prompts[0].token_ids} if self._wants_ids else None

    def encode_piece(self, piece: ChoiceUpdate) -> bytes:
        """Encode the role when the choice begins, what is new in it, and its end.

        Choices begin in order of their index: OpenAI's client appends the first chunk of each to a list.
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
            # Logprobs and ids belong to the whole piece and are sent once.
            first = _piece_choice(piece, delta_of(parts[0]) if parts else {"content": ""})
            out += self.envelope.frame(self._with_details(first, piece))
            parts = parts[1:]
        for part in parts:
            out += self._frame(piece, part)
        if piece.finish_reason is not None:
            out += self.envelope.frame(_choice(piece.index, {}, answer.finish_reason))
        return out

    @property
    def finish_reasons(self) -> Sequence[str]:
        return self._answers.finish_reasons

    def encode_end(self, usage: Usage) -> bytes:
        usage.reasoning_tokens = self._answers.num_reasoning_tokens
        return self.envelope.encode_end(usage)

    def encode_failure(self, error: WeftError) -> bytes:
        return error_frame(error)

    def encode_body(self, choices: Sequence[CollectedChoice], usage: Usage) -> bytes:
        rendered = []
        for index, choice in enumerate(choices):
            answer = self._answers.of(index)
            message = message_of(answer.take(choice.whole()))
            entry = {"index": index, "message": message, "logprobs": None, "finish_reason": answer.finish_reason}
            rendered.append(self._with_details(entry, choice))
        usage.reasoning_tokens = self._answers.num_reasoning_tokens
        return self.envelope.encode_body(
            rendered, usage, {**(self._prompt_ids or {}), **self._prompt_fields(choices[0])}
        )

    def _prompt_fields(self, choice: CollectedChoice) -> dict[str, Any]:
        """Return prompt logprobs in vLLM's format. The first choice holds them for all."""
        wanted, ids = self._prepared.generation.num_prompt_logprobs, self._prepared.prompts[0].token_ids
        if wanted is None:
            return {}
        return {"prompt_logprobs": prompt_logprobs(ids, choice.prompt_logprobs, wanted, self._codec)}

    def _frame(self, piece: ChoiceUpdate, part: Part) -> bytes:
        if (field := TEXT_FIELDS.get(part.kind)) is not None and not piece.is_draft:
            return self.envelope.text_frame(piece.index, field, part.text)
        return self.envelope.frame(_piece_choice(piece, delta_of(part)))

    def _with_details(self, entry: dict[str, Any], source: ChoiceUpdate | CollectedChoice) -> dict[str, Any]:
        if self._wants_logprobs:
            entry["logprobs"] = chat_logprobs(source.logprobs, self._codec)
        if self._wants_ids:
            entry["token_ids"] = source.token_ids
        return entry


def delta_of(part: Part) -> dict[str, Any]:
    """Return the delta of a part. A call's id, type and name come once; its index comes every time."""
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
    """Return an assistant message as a client would send it back."""
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
    """Return the complete tool calls of a message."""
    calls: list[dict[str, Any]] = []
    for part in joined(parts):
        if part.kind is PartKind.CALL:
            function = {"name": part.text, "arguments": ""}
            calls.append({"id": part.call_id, "type": "function", "function": function})
        elif part.kind is PartKind.ARGUMENTS:
            calls[-1]["function"]["arguments"] += part.text  # joined: once per call
        elif part.kind is PartKind.CUSTOM:
            calls.append({"id": part.call_id, "type": "custom", "custom": {"name": part.text, "input": ""}})
        elif part.kind is PartKind.INPUT:
            calls[-1]["custom"]["input"] += part.text
    return calls


def _choice(index: int, delta: dict[str, Any], finish_reason: FinishReason | None = None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}


def _piece_choice(piece: ChoiceUpdate, delta: dict[str, Any]) -> dict[str, Any]:
    """Return a choice, marked if it has draft tokens. Tool calls have no mark: Weft may repair their text."""
    choice = _choice(piece.index, delta)
    return choice | DRAFT if piece.is_draft and "tool_calls" not in delta else choice
