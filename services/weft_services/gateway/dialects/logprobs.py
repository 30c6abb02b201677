"""Token logprobs in API formats: chat's list of entries, completions' four parallel lists, vLLM's prompt logprobs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import orjson

from weft.request import PositionLogprobs, PromptLogprobs, TokenLogprob
from weft_services.gateway.mesh.generation_run import ChoiceUpdate
from weft_services.gateway.text.codec import Codec

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
