"""One choice of an answer as it grows: token deltas in, pieces of text out. No network, no clock."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass

from weft.request import FinishReason, PositionLogprobs
from weft_services.gateway.mesh.inbox import Delta
from weft_services.gateway.model import Codec
from weft_services.gateway.text.detokenizer import Detokenizer
from weft_services.gateway.text.stopping import StopScanner


@dataclass(frozen=True, slots=True)
class Piece:
    """What a batch of deltas added to choice `index`. The last piece has a finish reason."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[PositionLogprobs, ...]
    finish_reason: FinishReason | None


class Sequence:
    """Text state of one choice. `token_ids` is everything generated so far: what moving it elsewhere would need."""

    def __init__(self, index: int, codec: Codec, stops: Items[str]) -> None:
        self.index = index
        self.token_ids: list[int] = []
        self.finish_reason: FinishReason | None = None
        self._detokenizer = Detokenizer(codec.decode)
        self._scanner = StopScanner(stops)
        self._steps_by_token = bool(stops)  # the token that completes a stop string must be told from those after it

    def accept(self, deltas: Items[Delta]) -> Piece:
        """Take the deltas in, in order; those after the end are dropped."""
        texts: list[str] = []
        start = len(self.token_ids)
        logprobs: list[PositionLogprobs] = []
        for delta in deltas:
            if self.finish_reason is not None:
                break
            num_before = len(self.token_ids)
            texts.append(self._accept_one(delta))
            logprobs.extend(delta.logprobs[: len(self.token_ids) - num_before])
        tokens = tuple(self.token_ids[start:])
        return Piece(self.index, "".join(texts), tokens, tuple(logprobs), self.finish_reason)

    def _accept_one(self, delta: Delta) -> str:
        ids = delta.token_ids
        # the token that ends a sequence is counted and reported, its text is not part of the answer
        spoken = ids[:-1] if delta.finish_reason is FinishReason.STOP else ids
        groups = [(token,) for token in spoken] if self._steps_by_token else [spoken]
        texts: list[str] = []
        for group in groups:
            self.token_ids.extend(group)
            text, stopped = self._scanner.push(self._detokenizer.push(group))
            texts.append(text)
            if stopped:
                self.finish_reason = FinishReason.STOP
                return "".join(texts)
        self.token_ids.extend(ids[len(spoken) :])
        if delta.finish_reason is not None:
            texts.append(self._end(delta.finish_reason))
        return "".join(texts)

    def _end(self, reason: FinishReason) -> str:
        text, stopped = self._scanner.push(self._detokenizer.flush())
        self.finish_reason = FinishReason.STOP if stopped else reason
        return text if stopped else text + self._scanner.flush()
