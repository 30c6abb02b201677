"""The text of one choice: decodes its tokens, finds stop strings, ends it at its limit."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace
from itertools import groupby

from weft.request import NO_DRAFTS, DraftCounts, FinishReason, PositionLogprobs, PromptLogprobs
from weft_services.gateway.mesh.decode_connection import SequenceUpdate
from weft_services.gateway.text.assistant import StopMatcher
from weft_services.gateway.text.codec import Codec


@dataclass(slots=True)  # Not frozen: one is created per token.
class ChoiceUpdate:
    """What a batch of updates adds to choice `index`.

    The last one has a finish reason, and the stop string if one was met. The first one has the prompt logprobs, if
    requested. With `is_draft` all its tokens were drafts; only `accept_apart` sets it.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[PositionLogprobs, ...]
    finish_reason: FinishReason | None
    stop: str | None = None
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()
    is_draft: bool = False


class ChoiceText:
    """Text state of one choice. `token_ids` holds all generated tokens, which a migration resends.

    `drafts` counts the draft tokens of all attempts.

    The choice ends after `max_tokens`, whether or not the worker reports the end.
    """

    def __init__(
        self, index: int, codec: Codec, stops: StopMatcher | None, max_tokens: int, context: Items[int] = ()
    ) -> None:
        """`context`: the last prompt tokens, if the answer continues their text."""
        self.index = index
        self.token_ids: list[int] = []
        self.drafts = NO_DRAFTS
        self.finish_reason: FinishReason | None = None
        self._stop: str | None = None
        self._prompt_logprobs: list[PromptLogprobs] = []  # not reported yet
        self._max_tokens = max_tokens
        self._detokenizer = codec.detokenizer(context)
        self._stops = stops

    def accept(self, deltas: Items[SequenceUpdate]) -> ChoiceUpdate:
        """Apply updates in order. Updates after the end of the choice are dropped."""
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
            if delta.drafts.verified:
                self.drafts += _kept(delta.drafts, len(self.token_ids) - num_before)
            if delta.logprobs:
                logprobs.extend(delta.logprobs[: len(self.token_ids) - num_before])
        tokens = tuple(self.token_ids[start:])
        update = ChoiceUpdate(self.index, "".join(texts), tokens, tuple(logprobs), self.finish_reason, self._stop)
        if self._prompt_logprobs and (tokens or self.finish_reason is not None):
            update.prompt_logprobs = tuple(self._prompt_logprobs)
            self._prompt_logprobs.clear()
        return update

    def accept_apart(self, deltas: Items[SequenceUpdate]) -> list[ChoiceUpdate]:
        """Apply updates like `accept`, but return accepted drafts and other tokens in separate updates."""
        updates: list[ChoiceUpdate] = []
        for is_draft, batch in groupby(_draft_parts(deltas), key=lambda part: part.drafts.accepted > 0):
            update = self.accept(tuple(batch))
            update.is_draft = is_draft
            updates.append(update)
            if self.finish_reason is not None:
                break
        return updates

    def _note(self, update: PromptLogprobs) -> None:
        """Store prompt logprobs of an attempt without tokens; if that attempt is lost, the next one starts over."""
        if update.start == 1:
            self._prompt_logprobs.clear()
        self._prompt_logprobs.append(update)

    def _accept_one(self, delta: SequenceUpdate) -> str:
        room = self._max_tokens - len(self.token_ids)
        ids, reason = delta.token_ids, delta.finish_reason
        if len(ids) > room or (len(ids) == room and reason is None):
            ids, reason = ids[:room], FinishReason.LENGTH
        # The token that ends a sequence is counted and reported; its text is not part of the answer.
        text_ids = ids[:-1] if reason is FinishReason.STOP else ids
        text = self._detokenize(text_ids) if self._stops is None else self._scan(text_ids, self._stops)
        if self.finish_reason is None:
            self.token_ids.extend(ids[len(text_ids) :])
            if reason is not None:
                text += self._end(reason)
        return text

    def _detokenize(self, ids: tuple[int, ...]) -> str:
        self.token_ids.extend(ids)
        return self._detokenizer.push(ids)

    def _scan(self, ids: tuple[int, ...], stops: StopMatcher) -> str:
        """Decode token by token, to separate the token that completes a stop string from those after it."""
        texts: list[str] = []
        for token_id in ids:
            text, self._stop = stops.push(self._detokenize((token_id,)))
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


def _draft_parts(deltas: Items[SequenceUpdate]) -> Iterator[SequenceUpdate]:
    """Split each update behind its accepted drafts. A part with accepted drafts contains no other tokens."""
    for delta in deltas:
        num_drafts = delta.drafts.accepted
        # The finish reason stays with the last token: that token may be one without text.
        if not 0 < num_drafts < len(delta.token_ids):
            yield delta
            continue
        ids, logprobs = delta.token_ids, delta.logprobs
        yield replace(delta, token_ids=ids[:num_drafts], logprobs=logprobs[:num_drafts], finish_reason=None)
        yield replace(delta, token_ids=ids[num_drafts:], logprobs=logprobs[num_drafts:], drafts=NO_DRAFTS)


def _kept(drafts: DraftCounts, num_tokens: int) -> DraftCounts:
    """Return the counts of a step of which the answer keeps `num_tokens`: drafts behind a stop string are rejected."""
    if drafts.accepted <= num_tokens:
        return drafts
    return replace(drafts, accepted=num_tokens, predicted_accepted=min(num_tokens, drafts.predicted_accepted))
