"""What the encoders share: choices parsed into parts, token usage, logprobs and server-sent events."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from weft.errors import WeftError
from weft.request import NO_DRAFTS, DraftCounts, FinishReason, PositionLogprobs, PromptLogprobs, TokenLogprob
from weft_services.gateway.error_body import error_body
from weft_services.gateway.mesh.choice_text import ChoiceUpdate
from weft_services.gateway.mesh.prepare import PreparedRequest
from weft_services.gateway.text.assistant import AnswerReader
from weft_services.gateway.text.codec import Codec
from weft_services.gateway.text.custom_calls import CustomCalls
from weft_services.gateway.text.harmony import ThoughtCounter
from weft_services.gateway.text.parts import Part, PartKind


class ChatChoice:
    """Parses one choice of a chat answer into parts."""

    def __init__(
        self,
        reader: AnswerReader,
        end_of_thoughts: int | None,
        customs: CustomCalls | None = None,
        counter: ThoughtCounter | None = None,
    ) -> None:
        """`counter`: counts the tokens of thoughts instead of `end_of_thoughts`."""
        self.num_reasoning_tokens = 0
        self.finish_reason: FinishReason | None = None
        self._reader = reader
        self._end_of_thoughts = end_of_thoughts
        self._customs = customs
        self._counter = counter

    @property
    def num_held(self) -> int:
        """Characters received that may still become part of a marker."""
        return self._reader.num_held

    def take(self, piece: ChoiceUpdate) -> list[Part]:
        """Parse the next piece. The finish reason becomes tool_calls if the answer ends with complete calls."""
        parts = self._read(piece)
        return parts if self._customs is None else self._customs.read(parts, piece.finish_reason is not None)

    def _read(self, piece: ChoiceUpdate) -> list[Part]:
        if self._reader.is_plain and piece.finish_reason is None:
            return self._reader.push(piece.text)
        was_thinking, had_thought = self._reader.is_thinking, self._reader.has_thought
        parts = self._reader.push(piece.text)
        is_thinking = self._reader.is_thinking
        if piece.finish_reason is not None:
            # Only a stop string that contains a marker ends a call, see VisibleStops.
            is_stopped = piece.stop is not None and self._reader.is_in_call
            parts += self._reader.finish(is_cut=piece.finish_reason is FinishReason.LENGTH)
            is_call = piece.finish_reason is FinishReason.STOP and self._reader.num_calls and not is_stopped
            self.finish_reason = FinishReason.TOOL_CALLS if is_call else piece.finish_reason
        if self._counter is not None:
            self.num_reasoning_tokens += self._counter.count(piece.token_ids)
        elif is_thinking:
            self.num_reasoning_tokens += len(piece.token_ids)
        elif was_thinking or self._reader.has_thought is not had_thought:
            num_letters = sum(len(part.text) for part in parts if part.kind is PartKind.REASONING)
            self.num_reasoning_tokens += self._count(piece, num_letters)
        return parts

    def _count(self, piece: ChoiceUpdate, num_letters: int) -> int:
        """Count tokens up to the one that ends thoughts, or estimate by the share of the text."""
        if self._end_of_thoughts in piece.token_ids:
            return piece.token_ids.index(self._end_of_thoughts) + 1
        return round(len(piece.token_ids) * num_letters / max(1, len(piece.text)))


class ChatChoices:
    """All choices of a request by index, created on demand.

    The first is created at once, while its first token is still being computed.
    """

    def __init__(self, prepared: PreparedRequest) -> None:
        self._prepared = prepared
        self._answers = {0: self._begin(0)}

    @property
    def num_reasoning_tokens(self) -> int:
        """Thought tokens of all choices."""
        return sum(answer.num_reasoning_tokens for answer in self._answers.values())

    @property
    def finish_reasons(self) -> Sequence[str]:
        """Finish reasons of the ended choices by index, including tool calls."""
        ends = [self._answers[index].finish_reason for index in sorted(self._answers)]
        return [str(reason) for reason in ends if reason is not None]

    def of(self, index: int) -> ChatChoice:
        """Return the choice of that index."""
        if index not in self._answers:
            self._answers[index] = self._begin(index)
        return self._answers[index]

    def _begin(self, index: int) -> ChatChoice:
        use = self._prepared.generation.tool_use
        customs = CustomCalls(use.custom) if use is not None and use.custom else None
        counter = self._prepared.thought_counter(index)
        return ChatChoice(self._prepared.reader(index), self._prepared.model.end_thoughts_id, customs, counter)


@dataclass(slots=True)
class Usage:
    """Token counts of a whole request."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    reasoning_tokens: int = 0
    drafts: DraftCounts = NO_DRAFTS

    @property
    def rejected_prediction_tokens(self) -> int:
        """Verified tokens of the client's prediction that are no part of the answer, nor of `completion_tokens`."""
        return self.drafts.predicted - self.drafts.predicted_accepted

    def fields(self) -> dict[str, Any]:
        """Return OpenAI's usage object. It always contains cached_tokens."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            "completion_tokens_details": {
                "reasoning_tokens": self.reasoning_tokens,
                "accepted_prediction_tokens": self.drafts.predicted_accepted,
                "rejected_prediction_tokens": self.rejected_prediction_tokens,
            },
        }


@dataclass(slots=True)
class CollectedChoice:
    """All pieces of one choice, collected."""

    index: int = 0
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop: str | None = None
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()

    def add(self, piece: ChoiceUpdate) -> None:
        self.texts.append(piece.text)
        self.token_ids.extend(piece.token_ids)
        self.logprobs.extend(piece.logprobs)
        self.finish_reason, self.stop = piece.finish_reason, piece.stop
        self.prompt_logprobs = self.prompt_logprobs or piece.prompt_logprobs

    @property
    def mean_logprob(self) -> float:
        """The score that ranks candidates of `best_of`."""
        return sum(position.chosen.logprob for position in self.logprobs) / max(1, len(self.logprobs))

    def whole(self) -> ChoiceUpdate:
        """Return the choice as a single piece."""
        tokens, logprobs = tuple(self.token_ids), tuple(self.logprobs)
        return ChoiceUpdate(self.index, "".join(self.texts), tokens, logprobs, self.finish_reason, self.stop)


LOWEST = -9999.0  # JSON has no -inf
Alternatives = Iterable[tuple[int, float]]


def chat_logprobs(positions: Sequence[PositionLogprobs], codec: Codec) -> dict[str, Any]:
    """Return the `logprobs` object of a chat choice."""
    return {"content": [_position_entry(position, codec) for position in positions], "refusal": None}


def _position_entry(position: PositionLogprobs, codec: Codec) -> orjson.Fragment:
    """Serialize a position at once: with alternatives it is a hundred objects, costlier to keep than to write."""
    top = [_entry(entry, codec) for entry in position.top]
    return orjson.Fragment(orjson.dumps({**_entry(position.chosen, codec), "top_logprobs": top}))


class TextLogprobs:
    """Selects the logprobs of an answer's text from those of thoughts and calls."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self._detokenizer = codec.detokenizer()
        self._num_ahead = 0  # characters of received tokens without their text
        self._waiting: list[tuple[PositionLogprobs, str]] = []  # each with the text it spells

    def one_by_one(self, piece: ChoiceUpdate) -> Iterator[ChoiceUpdate]:
        """Split a piece into pieces of one token, so that text is attributed to the right token."""
        if len(piece.logprobs) != len(piece.token_ids):
            yield piece  # the client did not ask for logprobs
            return
        rest = piece.text
        for token_id, position in zip(piece.token_ids, piece.logprobs, strict=True):
            spelled = self._detokenizer.push((token_id,))
            if spelled or not self._codec.is_special(token_id):
                self._waiting.append((position, spelled))
            self._num_ahead += len(spelled)
            text, rest = rest[: self._num_ahead], rest[self._num_ahead :]
            self._num_ahead -= len(text)
            yield ChoiceUpdate(piece.index, text, (token_id,), (), None)
        if rest or piece.finish_reason is not None:
            yield ChoiceUpdate(piece.index, rest, (), (), piece.finish_reason, piece.stop)

    def take(self, text: str, num_held: int) -> list[PositionLogprobs]:
        """Return the logprobs of the tokens that spell `text`.

        `num_held` further characters have arrived after it and are not delivered yet. Tokens before the text belong to
        no text and are dropped.
        """
        before, num_shared = self._before(num_held)
        taken: list[PositionLogprobs] = []
        for position, spelled in reversed(before):
            if spelled and not text:
                break
            if self._codec.is_special(position.chosen.token_id) and not text.endswith(spelled):
                # A marker that turned out to be no text, or that may still become text.
                self._waiting[:0] = [] if taken else [(position, spelled)]
                continue
            taken.append(position)
            text = text[: max(0, len(text) - len(spelled) + num_shared)]
            num_shared = 0
        return taken[::-1]

    def skip(self, num_held: int) -> None:
        """Drop tokens that are no text, except those of the last `num_held` characters.

        A token that spans both stays.
        """
        before, num_shared = self._before(num_held)
        if num_shared and before:
            position, spelled = before[-1]
            self._waiting.insert(0, (position, spelled[-num_shared:]))

    def _before(self, num_held: int) -> tuple[list[tuple[PositionLogprobs, str]], int]:
        """Split the waiting tokens before the last `num_held` characters.

        Returns the tokens before, and how many of these characters the last of them spells.
        """
        num_held += self._num_ahead
        place = len(self._waiting)
        while place and len(self._waiting[place - 1][1]) <= num_held:
            place -= 1
            num_held -= len(self._waiting[place][1])
        before, self._waiting = self._waiting[:place], self._waiting[place:]
        return before, num_held


class CompletionLogprobs:
    """Builds the `logprobs` objects of one completion choice piece by piece. Offsets refer to its whole text."""

    def __init__(self, codec: Codec, context: Sequence[int] = ()) -> None:
        self._codec = codec
        self._detokenizer = codec.detokenizer(context)
        self._offset = 0
        self._begin()

    def repeat(self, text: str, token_ids: Sequence[int], scores: Iterable[PromptLogprobs], num_top: int) -> None:
        """Begin with the prompt; its first token has no logprob. The next `take` returns it."""
        codec = self._codec
        offsets = _offsets(text, token_ids, codec)
        self._add(token_ids[0], next(offsets), None, None)
        for token_id, offset, (_, logprob, top) in zip(token_ids[1:], offsets, _walk(scores, num_top), strict=True):
            self._add(token_id, offset, logprob, top)
        self._offset = len(text)

    def take(self, positions: Sequence[PositionLogprobs]) -> dict[str, Any]:
        """Return the logprobs since the last call, including these generated tokens."""
        for position in positions:
            token_id = position.chosen.token_id
            top = [(entry.token_id, entry.logprob) for entry in position.top]
            self._add(token_id, self._offset, position.chosen.logprob, top)
            self._offset += len(self._detokenizer.push((token_id,)))
        lists = self._lists
        self._begin()
        return lists

    def _begin(self) -> None:
        self._lists: dict[str, list[Any]] = {
            "tokens": [],
            "token_logprobs": [],
            "top_logprobs": [],
            "text_offset": [],
        }

    def _add(self, token_id: int, offset: int, logprob: float | None, top: Alternatives | None) -> None:
        lists, codec = self._lists, self._codec
        lists["tokens"].append(codec.token_text(token_id))
        lists["token_logprobs"].append(None if logprob is None else max(logprob, LOWEST))
        lists["text_offset"].append(offset)
        if logprob is None or top is None:
            lists["top_logprobs"].append(None)
            return
        best: dict[str, float] = {}
        for each, value in ((token_id, logprob), *top):
            text = codec.token_text(each)
            best[text] = max(value, best.get(text, LOWEST))  # different partial characters have the same text
        lists["top_logprobs"].append(best)


def prompt_logprobs(
    token_ids: Sequence[int], scores: Iterable[PromptLogprobs], num_top: int, codec: Codec
) -> list[dict[str, Any] | None]:
    """Return vLLM's list: per prompt token, that token and the best alternatives by id; None for the first."""
    found: list[dict[str, Any] | None] = [None]
    for token_id, (rank, logprob, top) in zip(token_ids[1:], _walk(scores, num_top), strict=True):
        ranked = {each: (place, value) for place, (each, value) in enumerate(top, 1)}
        entries = {token_id: (rank, logprob)} | ranked
        found.append(
            {
                str(each): {"logprob": max(value, LOWEST), "rank": place, "decoded_token": codec.token_text(each)}
                for each, (place, value) in entries.items()
            }
        )
    return found


def positions_of(token_ids: Sequence[int], scores: Iterable[PromptLogprobs], num_top: int) -> list[PositionLogprobs]:
    """Return prompt logprobs in the form of generated tokens, from the second prompt token on."""
    return [
        PositionLogprobs(TokenLogprob(token_id, logprob), tuple(TokenLogprob(*pair) for pair in top))
        for token_id, (_, logprob, top) in zip(token_ids[1:], _walk(scores, num_top), strict=True)
    ]


def _walk(scores: Iterable[PromptLogprobs], num_top: int) -> Iterator[tuple[int, float, Alternatives]]:
    """Yield rank, logprob and the first `num_top` alternatives of each prompt token from the second on."""
    for piece in scores:
        for at, (rank, logprob) in enumerate(zip(piece.ranks, piece.chosen, strict=True)):
            first = at * piece.num_top
            last = first + min(num_top, piece.num_top)
            yield rank, logprob, zip(piece.top_ids[first:last], piece.top[first:last], strict=True)


def _offsets(text: str, token_ids: Iterable[int], codec: Codec) -> Iterator[int]:
    """Yield where each token begins in the text.

    Special tokens and an added leading space are not in the text and have length 0.
    """
    detokenizer, offset = codec.whole_detokenizer(), 0
    for token_id in token_ids:
        yield offset
        spelled = detokenizer.push((token_id,))
        if not text.startswith(spelled, offset):
            bare = spelled.removeprefix(" ")
            spelled = "" if codec.is_special(token_id) else bare if text.startswith(bare, offset) else spelled
        offset = min(offset + len(spelled), len(text))


def _entry(entry: TokenLogprob, codec: Codec) -> dict[str, Any]:
    text = codec.token_text(entry.token_id)
    return {"token": text, "logprob": max(entry.logprob, LOWEST), "bytes": list(codec.token_bytes(entry.token_id))}


DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
# Padded events have a multiple of this length.
GRAIN_BYTES = 64
_BARE = len(b',"obfuscation":""')


def error_frame(error: WeftError) -> bytes:
    """Encode OpenAI's error frame for a stream that has begun."""
    return b"data: " + error_body(error) + b"\n\n" + DONE


def event(kind: str, **fields: Any) -> bytes:
    """Encode an event with its type as name."""
    return b"event: " + kind.encode() + b"\ndata: " + orjson.dumps({"type": kind, **fields}) + b"\n\n"


def with_obfuscation(event: bytes) -> bytes:
    """Add a field of random letters to an event that ends with an object and an empty line.

    Lengths of encrypted packets reveal token lengths and thereby much of the text (arXiv 2511.03675).
    """
    missing = -(len(event) + _BARE) % GRAIN_BYTES
    letters = secrets.token_hex(GRAIN_BYTES // 2)[:missing].encode()
    return event.removesuffix(b"}\n\n") + b',"obfuscation":"' + letters + b'"}\n\n'
