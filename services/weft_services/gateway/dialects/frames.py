"""Answers in OpenAI's words: SSE frames for streams, whole bodies otherwise. Bytes out; no network."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from weft.errors import WeftError
from weft.ids import new_id
from weft.request import FinishReason, PositionLogprobs, PromptLogprobs
from weft_services.gateway.dialects.logprobs import CompletionLogprobs, prompt_logprobs
from weft_services.gateway.dialects.padding import padded
from weft_services.gateway.error_body import error_body
from weft_services.gateway.mesh.prepare import PreparedRequest
from weft_services.gateway.mesh.sequence_runner import ChoiceUpdate

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"


@dataclass(slots=True)
class Usage:
    """Token counts of a whole request."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    reasoning_tokens: int = 0

    def fields(self) -> dict[str, Any]:
        """As OpenAI spells it; cached_tokens is always there."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
        }


@dataclass(slots=True)
class Choice:
    """A choice collected to its end."""

    index: int = 0
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop: str | None = None
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()

    def add(self, piece: ChoiceUpdate) -> None:
        """The next piece of it."""
        self.texts.append(piece.text)
        self.token_ids.extend(piece.token_ids)
        self.logprobs.extend(piece.logprobs)
        self.finish_reason, self.stop = piece.finish_reason, piece.stop
        self.prompt_logprobs = self.prompt_logprobs or piece.prompt_logprobs

    @property
    def mean_logprob(self) -> float:
        """By which the best of several are told."""
        return sum(position.chosen.logprob for position in self.logprobs) / max(1, len(self.logprobs))

    def whole(self) -> ChoiceUpdate:
        """All of it at once."""
        tokens, logprobs = tuple(self.token_ids), tuple(self.logprobs)
        return ChoiceUpdate(self.index, "".join(self.texts), tokens, logprobs, self.finish_reason, self.stop)


def error_frame(error: WeftError) -> bytes:
    """How a stream that has begun tells of a failure."""
    return b"data: " + error_body(error) + b"\n\n" + DONE


def event(kind: str, **fields: Any) -> bytes:
    """One event of a stream whose events have names."""
    return b"event: " + kind.encode() + b"\ndata: " + orjson.dumps({"type": kind, **fields}) + b"\n\n"


class Envelope:
    """The fields that every frame and body of one answer has in common, serialized once."""

    def __init__(self, prefix: str, kinds: tuple[str, str], prepared: PreparedRequest, fingerprint: str | None) -> None:
        """`kinds` are the object names of a whole body and of a stream's chunk."""
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
        """Chunks from here on tell the usage so far, where the client asks for that; what was cached comes last."""
        if self._running is not None:
            self._running.completion_tokens += num_tokens
            counts = self._running.fields()
            told = {name: counts[name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")}
            self._usage = b',"usage":' + orjson.dumps(told)

    def frame(self, choice: dict[str, Any], extra: dict[str, Any] | None = None) -> bytes:
        """One chunk with one choice; `extra` are further fields beside `choices`."""
        more = b"," + orjson.dumps(extra)[1:-1] if extra else b""
        frame = self._head + orjson.dumps(choice) + b"]" + more + self._usage + b"}\n\n"
        return padded(frame) if self._is_padded else frame

    def text_frame(self, index: int, field: bytes, text: str) -> bytes:
        """The chunk that nearly all are, with nothing but more of one text: the same as of `frame`, put together from
        what was serialized before."""
        if self._running is not None:
            return self.frame(
                {"index": index, "delta": {field.decode(): text}, "logprobs": None, "finish_reason": None}
            )
        frame = b'%b{"index":%d,"delta":{"%b":%b%b' % (self._head, index, field, orjson.dumps(text), self._tail)
        return padded(frame) if self._is_padded else frame

    def end(self, usage: Usage) -> bytes:
        """The chunk without choices where stream_options.include_usage asks for it, and [DONE]."""
        if not self._ends_with_usage:
            return DONE
        return self._head + b'],"usage":' + orjson.dumps(usage.fields()) + b"}\n\n" + DONE

    def body(self, choices: list[dict[str, Any]], usage: Usage, extra: dict[str, Any] | None = None) -> bytes:
        """A whole answer."""
        kind = {"object": self._body_kind}
        return orjson.dumps({**self._common, **kind, "choices": choices, "usage": usage.fields(), **(extra or {})})


class CompletionFrames:
    """The dialect of /v1/completions."""

    keep_alive = KEEP_ALIVE
    finish_reasons: Sequence[str] = ()  # the workers' own

    def __init__(self, prepared: PreparedRequest, fingerprint: str | None) -> None:
        self.envelope = Envelope("cmpl", ("text_completion", "text_completion"), prepared, fingerprint)
        self._codec = prepared.model.codec
        self._prepared = prepared
        self._wants_logprobs = prepared.generation.num_logprobs is not None
        self._wants_ids = prepared.generation.return_token_ids
        # by choice, from its first frame on; None where nobody asked for them
        self._logprobs: dict[int, CompletionLogprobs | None] = {}

    def frames(self, piece: ChoiceUpdate) -> bytes:
        """What is new of the choice, its end included."""
        self.envelope.count(len(piece.token_ids))
        has_details = bool(piece.token_ids) and (self._wants_ids or self._wants_logprobs)
        if not (piece.text or has_details or piece.finish_reason):
            return b""
        return self.envelope.frame(self._choice(piece.index, piece.text, piece, piece.prompt_logprobs))

    def end(self, usage: Usage) -> bytes:
        """The last frames of a stream."""
        return self.envelope.end(usage)

    def failure(self, error: WeftError) -> bytes:
        """The last frames of one that failed."""
        return error_frame(error)

    def body(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        """The whole answer: of each prompt's candidates the best, who have in common what is known of the prompt."""
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
        return self.envelope.body(rendered, usage)

    def _choice(
        self, index: int, text: str, source: ChoiceUpdate | Choice, scores: Sequence[PromptLogprobs]
    ) -> dict[str, Any]:
        """`scores`: of the prompt; used where the choice begins."""
        asked, prompt = self._prepared.generation, self._prepared.prompts[self._prepared.sequences[index].prompt]
        entry: dict[str, Any] = {"index": index, "text": text, "logprobs": None, "finish_reason": source.finish_reason}
        if is_first := index not in self._logprobs:
            self._logprobs[index] = CompletionLogprobs(self._codec, prompt.context) if self._wants_logprobs else None
        told = self._logprobs[index]
        if is_first and asked.repeats_prompt:
            entry["text"] = prompt.text + text
            if told is not None and asked.num_logprobs is not None:
                told.repeat(prompt.text, prompt.token_ids, scores, asked.num_logprobs)
        if told is not None:
            entry["logprobs"] = told.take(source.logprobs)
        if is_first and asked.num_prompt_logprobs is not None:
            wanted = asked.num_prompt_logprobs
            entry["prompt_logprobs"] = prompt_logprobs(prompt.token_ids, scores, wanted, self._codec)
        if self._wants_ids:
            entry["token_ids"] = source.token_ids
            if is_first:
                entry["prompt_token_ids"] = prompt.token_ids
        return entry
