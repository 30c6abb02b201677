"""Token logprobs as clients want them: chat's list of entries, completions' four parallel lists, vLLM's of a prompt."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import orjson

from weft.request import PositionLogprobs, PromptLogprobs, TokenLogprob
from weft_services.gateway.mesh.sequence_runner import ChoiceUpdate
from weft_services.gateway.text.codec import Codec

LOWEST = -9999.0  # JSON has no -inf
Alternatives = Iterable[tuple[int, float]]


def chat_logprobs(positions: Sequence[PositionLogprobs], codec: Codec) -> dict[str, Any]:
    """The `logprobs` object of a chat choice."""
    return {"content": [_told(position, codec) for position in positions], "refusal": None}


def _told(position: PositionLogprobs, codec: Codec) -> orjson.Fragment:
    """As JSON at once: with its alternatives it is a hundred objects, which take longer to keep than to write."""
    top = [_entry(entry, codec) for entry in position.top]
    return orjson.Fragment(orjson.dumps({**_entry(position.chosen, codec), "top_logprobs": top}))


class TextLogprobs:
    """The logprobs of an answer's text alone, where other tokens of it are thoughts and calls."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self._detokenizer = codec.detokenizer()
        self._num_ahead = 0  # letters of tokens that have come, and whose text has not
        self._waiting: list[tuple[PositionLogprobs, str]] = []  # each with what it spells

    def one_by_one(self, piece: ChoiceUpdate) -> Iterator[ChoiceUpdate]:
        """The same in pieces of a token each, so that what is found in one is of that token and those before it."""
        if len(piece.logprobs) != len(piece.token_ids):
            yield piece  # nobody asked for them
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
        """Of the tokens that this text is of, behind which `num_held` more letters have come that nobody has been told
        of. What was before them was no text."""
        before, num_shared = self._before(num_held)
        taken: list[PositionLogprobs] = []
        for position, spelled in reversed(before):
            if spelled and not text:
                break
            if self._codec.is_special(position.chosen.token_id) and not text.endswith(spelled):
                # a mark, of what is no text after all or might still be some
                self._waiting[:0] = [] if taken else [(position, spelled)]
                continue
            taken.append(position)
            text = text[: max(0, len(text) - len(spelled) + num_shared)]
            num_shared = 0
        return taken[::-1]

    def skip(self, num_held: int) -> None:
        """What has come is no text, but for `num_held` letters that might be: a token with some of both waits on."""
        before, num_shared = self._before(num_held)
        if num_shared and before:
            position, spelled = before[-1]
            self._waiting.insert(0, (position, spelled[-num_shared:]))

    def _before(self, num_held: int) -> tuple[list[tuple[PositionLogprobs, str]], int]:
        """What waits before the tokens of these letters, which wait on; and how many of them its last token has."""
        num_held += self._num_ahead
        place = len(self._waiting)
        while place and len(self._waiting[place - 1][1]) <= num_held:
            place -= 1
            num_held -= len(self._waiting[place][1])
        before, self._waiting = self._waiting[:place], self._waiting[place:]
        return before, num_held


class CompletionLogprobs:
    """The `logprobs` objects of one completion choice, piece by piece; offsets are places in all of its text."""

    def __init__(self, codec: Codec, context: Sequence[int] = ()) -> None:
        self._codec = codec
        self._detokenizer = codec.detokenizer(context)
        self._offset = 0
        self._begin()

    def repeat(self, text: str, token_ids: Sequence[int], scores: Iterable[PromptLogprobs], num_top: int) -> None:
        """The choice begins with its prompt, of whose first token nothing is known. Told with the next `take`."""
        codec = self._codec
        offsets = _offsets(text, token_ids, codec)
        self._add(token_ids[0], next(offsets), None, None)
        for token_id, offset, (_, chance, top) in zip(token_ids[1:], offsets, _walk(scores, num_top), strict=True):
            self._add(token_id, offset, chance, top)
        self._offset = len(text)

    def take(self, positions: Sequence[PositionLogprobs]) -> dict[str, Any]:
        """What is new, with these generated tokens behind it."""
        for position in positions:
            token_id = position.chosen.token_id
            top = [(entry.token_id, entry.logprob) for entry in position.top]
            self._add(token_id, self._offset, position.chosen.logprob, top)
            self._offset += len(self._detokenizer.push((token_id,)))
        told = self._told
        self._begin()
        return told

    def _begin(self) -> None:
        self._told: dict[str, list[Any]] = {
            "tokens": [],
            "token_logprobs": [],
            "top_logprobs": [],
            "text_offset": [],
        }

    def _add(self, token_id: int, offset: int, chance: float | None, top: Alternatives | None) -> None:
        told, codec = self._told, self._codec
        told["tokens"].append(codec.token_text(token_id))
        told["token_logprobs"].append(None if chance is None else max(chance, LOWEST))
        told["text_offset"].append(offset)
        if chance is None or top is None:
            told["top_logprobs"].append(None)
            return
        best: dict[str, float] = {}
        for each, value in ((token_id, chance), *top):
            text = codec.token_text(each)
            best[text] = max(value, best.get(text, LOWEST))  # parts of characters look alike
        told["top_logprobs"].append(best)


def prompt_logprobs(
    token_ids: Sequence[int], scores: Iterable[PromptLogprobs], num_top: int, codec: Codec
) -> list[dict[str, Any] | None]:
    """vLLM's list: by token id, each token of the prompt and the best ones in its place; nothing for the first."""
    found: list[dict[str, Any] | None] = [None]
    for token_id, (rank, chance, top) in zip(token_ids[1:], _walk(scores, num_top), strict=True):
        ranked = {each: (place, value) for place, (each, value) in enumerate(top, 1)}
        entries = {token_id: (rank, chance)} | ranked
        found.append(
            {
                str(each): {"logprob": max(value, LOWEST), "rank": place, "decoded_token": codec.token_text(each)}
                for each, (place, value) in entries.items()
            }
        )
    return found


def positions_of(token_ids: Sequence[int], scores: Iterable[PromptLogprobs], num_top: int) -> list[PositionLogprobs]:
    """The same in the form that generated tokens have, from the prompt's second token on."""
    return [
        PositionLogprobs(TokenLogprob(token_id, chance), tuple(TokenLogprob(*pair) for pair in top))
        for token_id, (_, chance, top) in zip(token_ids[1:], _walk(scores, num_top), strict=True)
    ]


def _walk(scores: Iterable[PromptLogprobs], num_top: int) -> Iterator[tuple[int, float, Alternatives]]:
    """Of each prompt token from the second on: rank, ln p, and so many of the alternatives that were told."""
    for piece in scores:
        for at, (rank, chance) in enumerate(zip(piece.ranks, piece.chosen, strict=True)):
            first = at * piece.num_top
            last = first + min(num_top, piece.num_top)
            yield rank, chance, zip(piece.top_ids[first:last], piece.top[first:last], strict=True)


def _offsets(text: str, token_ids: Iterable[int], codec: Codec) -> Iterator[int]:
    """Where in the text each token begins. What it does not have, as a tokenizer puts special tokens around it, or a
    space before it, takes no room."""
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
