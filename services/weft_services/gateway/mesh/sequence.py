"""One choice of an answer as it grows: token deltas in, pieces of text out. No network, no clock."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass

from weft.request import FinishReason, PositionLogprobs, PromptLogprobs
from weft_services.gateway.mesh.inbox import Delta
from weft_services.gateway.text.codec import Codec
from weft_services.gateway.text.stopping import Stops


@dataclass(slots=True)  # not frozen: there is one a token
class Piece:
    """What a batch of deltas added to choice `index`. The last piece has a finish reason, and the stop string if that
    was it; the first one what was asked of the prompt's logprobs."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[PositionLogprobs, ...]
    finish_reason: FinishReason | None
    stop: str | None = None
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()


class Sequence:
    """Text state of one choice. `token_ids` is everything generated so far: what moving it elsewhere would need.

    It ends with `max_tokens`, whether the worker that generates says so or not.
    """

    def __init__(
        self, index: int, codec: Codec, stops: Stops | None, max_tokens: int, context: Items[int] = ()
    ) -> None:
        """`context`: the last tokens of a text that is gone on with."""
        self.index = index
        self.token_ids: list[int] = []
        self.finish_reason: FinishReason | None = None
        self._stop: str | None = None
        self._prompt_logprobs: list[PromptLogprobs] = []  # that nobody has been told yet
        self._max_tokens = max_tokens
        self._detokenizer = codec.detokenizer(context)
        self._stops = stops

    def accept(self, deltas: Items[Delta]) -> Piece:
        """Take the deltas in, in order; those after the end are dropped."""
        texts: list[str] = []
        start = len(self.token_ids)
        logprobs: list[PositionLogprobs] = []
        for delta in deltas:
            if self.finish_reason is not None:
                break
            if delta.prompt_logprobs is not None:
                self._note(delta.prompt_logprobs)
                continue
            num_before = len(self.token_ids)
            texts.append(self._accept_one(delta))
            if delta.logprobs:
                logprobs.extend(delta.logprobs[: len(self.token_ids) - num_before])
        tokens = tuple(self.token_ids[start:])
        piece = Piece(self.index, "".join(texts), tokens, tuple(logprobs), self.finish_reason, self._stop)
        if self._prompt_logprobs and (tokens or self.finish_reason is not None):
            piece.prompt_logprobs = tuple(self._prompt_logprobs)
            self._prompt_logprobs.clear()
        return piece

    def _note(self, piece: PromptLogprobs) -> None:
        """Of an attempt that has not spoken yet; where that is lost, the next one begins again."""
        if piece.start == 1:
            self._prompt_logprobs.clear()
        self._prompt_logprobs.append(piece)

    def _accept_one(self, delta: Delta) -> str:
        room = self._max_tokens - len(self.token_ids)
        ids, reason = delta.token_ids, delta.finish_reason
        if len(ids) > room or (len(ids) == room and reason is None):
            ids, reason = ids[:room], FinishReason.LENGTH
        # the token that ends a sequence is counted and reported, its text is not part of the answer
        spoken = ids[:-1] if reason is FinishReason.STOP else ids
        text = self._speak(spoken) if self._stops is None else self._scan(spoken, self._stops)
        if self.finish_reason is None:
            self.token_ids.extend(ids[len(spoken) :])
            if reason is not None:
                text += self._end(reason)
        return text

    def _speak(self, ids: tuple[int, ...]) -> str:
        self.token_ids.extend(ids)
        return self._detokenizer.push(ids)

    def _scan(self, ids: tuple[int, ...], stops: Stops) -> str:
        """Token by token: the one that completes a stop string must be told from those after it."""
        texts: list[str] = []
        for token_id in ids:
            text, self._stop = stops.push(self._speak((token_id,)))
            texts.append(text)
            if self._stop is not None:
                self.finish_reason = FinishReason.STOP
                break
        return "".join(texts)

    def _end(self, reason: FinishReason) -> str:
        rest = self._detokenizer.flush()
        self.finish_reason = reason
        if self._stops is None:
            return rest
        text, self._stop = self._stops.push(rest)
        if self._stop is None:
            rest, self._stop = self._stops.finish(is_cut=reason is FinishReason.LENGTH)
            text += rest
        if self._stop is not None:
            self.finish_reason = FinishReason.STOP
        return text
