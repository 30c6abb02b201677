"""Turns a request into token ids, block keys and sampling parameters, and checks its limits.

The work is CPU-bound, so threads of `FairThreadPool` do it. Logprobs are limited because all of a request's lie in
memory at once.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from weft.errors import InvalidRequest
from weft.kv.block_pool import block_keys
from weft.request import SPECULATE, Grammar, SamplingParams, Speculation, new_seed
from weft_services.gateway.access.authentication import current_principal
from weft_services.gateway.generation import Conversation, Embedding, Generation, Prompt, TokenizeRequest
from weft_services.gateway.grammar.request_grammar import request_grammar
from weft_services.gateway.model import ServedModel
from weft_services.gateway.text.assistant import (
    THINK,
    AnswerReader,
    StopMatcher,
    StopScanner,
    VisibleStops,
    in_thoughts,
)
from weft_services.gateway.text.harmony import ANALYSIS, FINAL, MARKS, MESSAGE, ThoughtCounter, harmony
from weft_services.gateway.text.parts import Parser, Parts, new_call_id, plain

# Logprobs of prompt tokens and their alternatives in one request: about 10 MB of JSON.
MAX_PROMPT_LOGPROBS = 262_144
# Logprobs of all answers to one request that is not streamed, each about a hundred bytes of JSON.
MAX_ANSWER_LOGPROBS = 2_097_152


def check_prompt_logprobs(generation: Generation, num_tokens: int) -> None:
    """Check the logprobs of prompts with `num_tokens` in total. Raises InvalidRequest."""
    if generation.num_scored is None:
        return
    num_logprobs = num_tokens * (1 + generation.num_scored)
    if num_logprobs > MAX_PROMPT_LOGPROBS:
        field = "logprobs" if generation.num_prompt_logprobs is None else "prompt_logprobs"
        message = (
            f"{field}: {num_logprobs} logprobs of prompts exceed the limit of {MAX_PROMPT_LOGPROBS} in one request"
        )
        raise InvalidRequest(message, field, "invalid_value")


def max_logprob_tokens(generation: Generation, num_sequences: int) -> int:
    """Return how many tokens each of `num_sequences` answers may have with the requested logprobs."""
    if generation.stream or generation.in_pieces or generation.num_logprobs is None:
        return sys.maxsize
    return MAX_ANSWER_LOGPROBS // (num_sequences * (1 + generation.num_logprobs))


def too_many_logprobs(generation: Generation, token_limit: int) -> InvalidRequest:
    """Return the error for answers longer than that."""
    field = generation.max_tokens_field
    what = f"at most {token_limit} tokens per answer with this many answers and logprobs; stream the answer"
    return InvalidRequest(f"{field}: {what}", field, "invalid_value")


# OpenAI's limit for one request.
MAX_EMBEDDED_TOKENS = 300_000
# Texts up to this length are tokenized even beyond the context, if nothing is run. Clients use the count to decide what
# to drop.
MAX_COUNTED_CHARS = 1 << 20
# Enough to start with a whole character and a word.
CONTEXT_TOKENS = 8
Encode = Callable[[str], tuple[int, ...]]


class TooLong(InvalidRequest):
    """The prompt, or prompt and `max_tokens` together, exceed the context. `size` describes the prompt."""

    def __init__(self, message: str, param: str, size: str, limit: int, max_tokens: int | None = None) -> None:
        super().__init__(message, param, "context_length_exceeded")
        self.size, self.limit, self.max_tokens = size, limit, max_tokens


@dataclass(frozen=True, slots=True)
class PreparedPrompt:
    """Token ids, and the keys of their full blocks in order.

    `is_thinking`: the prompt ends inside thoughts. `text`: the prompt as text, if the answer repeats it; special tokens
    are included. `context`: the last tokens, if the answer continues the prompt's text.
    """

    token_ids: tuple[int, ...]
    block_keys: tuple[bytes, ...]
    is_thinking: bool = False
    text: str = ""
    context: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class PreparedSequence:
    """One choice of the answer: its prompt, sampling and token limit.

    Workers generate one token even if `max_tokens` is 0. `num_prompt_logprobs`: see `Generation.num_scored`; one of
    several choices of a prompt requests them for all.
    """

    prompt: int
    sampling: SamplingParams
    max_tokens: int
    num_prompt_logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A request ready to be placed. Sequence i becomes choice i."""

    generation: Generation
    model: ServedModel
    prompts: tuple[PreparedPrompt, ...]
    sequences: tuple[PreparedSequence, ...]
    cache_salt: bytes = b""
    speculation: Speculation = SPECULATE

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of all prompts; each counts once, however many choices continue it."""
        return sum(len(prompt.token_ids) for prompt in self.prompts)

    def reader(self, index: int) -> AnswerReader:
        """Return the reader that separates thoughts, calls and text of a chat's choice."""
        use, form = self.generation.tool_use, self.model.tool_format
        is_thinking = self._is_thinking(index)
        if self.model.has_channels:
            parts = Parts(new_call_id, is_parallel=use is None or use.is_parallel)
            return AnswerReader(harmony(use.schemas if use else None, self._begun(index)), parts, False, is_thinking)
        parser: Parser = plain
        new_id, ends_thoughts, call_openings = new_call_id, tuple[str, ...](), tuple[str, ...]()
        if use is not None and form is not None:
            parser, new_id = form.parser(use.schemas), form.new_id
            ends_thoughts, call_openings = form.ends_thoughts, form.call_openings
        is_parallel = use is None or use.is_parallel
        tags = self.model.thought_tags
        parts = Parts(new_id, is_parallel, holds_space=parser is not plain or tags is not None)
        return AnswerReader(parser, parts, tags is not None, is_thinking, ends_thoughts, tags or THINK, call_openings)

    def thought_counter(self, index: int) -> ThoughtCounter | None:
        """Return the counter of a choice's thoughts; None if only their last token tells them."""
        if not self.model.has_channels or MESSAGE not in self.model.marks:
            return None
        use = self.generation.tool_use
        names = use.schemas if use else ()
        return ThoughtCounter(self.model.marks, self.model.chat_codec.token_text, names, self._begun(index))

    def _is_thinking(self, index: int) -> bool:
        return self.prompts[self.sequences[index].prompt].is_thinking

    def _begun(self, index: int) -> str:
        """Return the header of the message that the answer continues; empty if it begins one."""
        prompt = self.generation.prompts[self.sequences[index].prompt]
        is_continued = isinstance(prompt, Conversation) and prompt.is_continued
        return ANALYSIS if self._is_thinking(index) else FINAL if is_continued else ""

    def stops(self, index: int) -> StopMatcher | None:
        """Return the matcher for a choice's stop strings; None without stop strings."""
        stops = self.generation.stop
        if not stops:
            return None
        markers: tuple[str, ...] = self.model.thought_tags or ()
        if self.model.has_channels:
            markers = MARKS
        elif self.generation.tool_use is not None and self.model.tool_format is not None:
            markers += self.model.tool_format.markers
        is_chat = isinstance(self.generation.prompts[0], Conversation)
        return VisibleStops(stops, markers, self.reader(index)) if is_chat and markers else StopScanner(stops)


@dataclass(frozen=True, slots=True)
class PreparedEmbedding:
    """Inputs ready to be sent to workers."""

    asked: Embedding
    inputs: tuple[tuple[int, ...], ...]
    cache_salt: bytes

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.inputs))


def prepare(generation: Generation, model: ServedModel, block_tokens: int | None, limit: int) -> PreparedRequest:
    """Render, tokenize, hash and check a request. Raises InvalidRequest naming the field.

    `block_tokens`: None while unknown, then nothing is hashed. `limit`: tokens of prompt and answer together.
    """
    cache_salt = current_principal.get().cache_salt
    prompts = []
    for prompt in generation.prompts:
        text = _text(prompt, generation.prompt_field, model)
        token_ids = _token_ids(text, generation.prompt_field, model, limit, _encoder(prompt, model, cache_salt))
        keys = block_keys(token_ids, block_tokens, cache_salt) if block_tokens else []
        begun = prompt.begun if isinstance(prompt, Conversation) else ""
        tags = model.thought_tags
        is_thinking = tags is not None and isinstance(text, str) and in_thoughts(text, tags, begun)
        repeated = _repeated(prompt, model) if generation.repeats_prompt else ""
        goes_on = not isinstance(prompt, Conversation) or prompt.is_continued
        context = token_ids[-CONTEXT_TOKENS:] if goes_on else ()
        prompts.append(PreparedPrompt(token_ids, tuple(keys), is_thinking, repeated, context))
    _check_named_tokens(generation, model)
    check_prompt_logprobs(generation, sum(len(prompt.token_ids) for prompt in prompts))
    grammar = None
    if generation.answer_format is not None or generation.tool_use is not None:
        grammar = request_grammar(generation, model, prompts[0].is_thinking)
    seed = new_seed() if generation.seed is None else generation.seed
    sequences = []
    num_sequences = len(prompts) * generation.num_candidates
    token_limit = max_logprob_tokens(generation, num_sequences)
    for index in range(num_sequences):
        place, candidate = divmod(index, generation.num_candidates)
        max_tokens = _max_tokens(generation, len(prompts[place].token_ids), limit, token_limit)
        sampling = _sampling(generation, model, max(1, max_tokens), _derive(seed, index), grammar)
        scored = generation.num_scored if candidate == 0 or generation.stream else None
        sequences.append(PreparedSequence(place, sampling, max_tokens, scored))
    speculation = _speculation(generation, model, limit)
    return PreparedRequest(generation, model, tuple(prompts), tuple(sequences), cache_salt, speculation)


def _speculation(generation: Generation, model: ServedModel, limit: int) -> Speculation:
    """Tokenize the prediction, which is at most as long as the context. All choices share it."""
    text = generation.prediction
    if not text or not generation.speculates:
        return Speculation(generation.speculates)
    token_ids: tuple[int, ...] = ()
    if is_short := len(text) <= limit * model.codec.longest_token_bytes:
        token_ids = model.codec.encode(text, add_special_tokens=False)
    if not is_short or len(token_ids) > limit:
        size = f"{len(token_ids)} tokens" if is_short else f"{len(text)} characters"
        message = f"prediction.content: {size} exceed this model's maximum context length of {limit} tokens"
        raise InvalidRequest(f"{message}; send only the part that the answer repeats", "prediction.content")
    return Speculation(prediction=token_ids)


def _repeated(prompt: Prompt, model: ServedModel) -> str:
    return model.codec.whole_text(prompt) if isinstance(prompt, tuple) else str(prompt)


def _encoder(prompt: Prompt, model: ServedModel, cache_salt: bytes) -> Encode:
    """Return the encoder: templates write special tokens themselves, other texts get those of the tokenizer."""
    if isinstance(prompt, Conversation):
        return partial(model.chats.encode, salt=cache_salt)
    return partial(model.codec.encode, add_special_tokens=True)


def _token_ids(
    text: str | tuple[int, ...], field: str, model: ServedModel, limit: int, encode: Encode
) -> tuple[int, ...]:
    if isinstance(text, tuple):
        token_ids = text
        _check_size(len(token_ids), field, limit)
        check_ids(token_ids, field, model)
        return token_ids
    if len(text) > limit * model.codec.longest_token_bytes:  # certainly too long, so do not tokenize it
        raise _too_long(f"a text of {len(text)} characters", field, limit)
    token_ids = _encode(encode, text, field)
    _check_size(len(token_ids), field, limit)
    return token_ids


def _encode(encode: Encode, text: str, field: str) -> tuple[int, ...]:
    if not (token_ids := encode(text)):
        raise InvalidRequest(f"{field} is empty", field, "invalid_value")
    return token_ids


def tokenize(asked: TokenizeRequest, model: ServedModel, limit: int) -> tuple[int, ...]:
    """Return the ids of a prompt, even if it exceeds the context. Raises as `prepare`."""
    codec = model.written if isinstance(asked.prompt, Conversation) else model.codec
    encode = partial(codec.encode, add_special_tokens=asked.add_special_tokens)
    return _count_ids(_text(asked.prompt, asked.field, model), asked.field, model, limit, encode)


def count(generation: Generation, model: ServedModel, limit: int) -> int:
    """Return the number of prompt tokens; the rest of the request is ignored. Raises as `prepare`."""
    salt, field = current_principal.get().cache_salt, generation.prompt_field
    prompts = [(_text(prompt, field, model), _encoder(prompt, model, salt)) for prompt in generation.prompts]
    return sum(len(_count_ids(text, field, model, limit, encode)) for text, encode in prompts)


def _count_ids(
    text: str | tuple[int, ...], field: str, model: ServedModel, limit: int, encode: Encode
) -> tuple[int, ...]:
    if isinstance(text, tuple):
        return text
    if len(text) > max(MAX_COUNTED_CHARS, limit * model.codec.longest_token_bytes):
        raise _too_long(f"a text of {len(text)} characters", field, limit)
    return _encode(encode, text, field)


def prepare_embedding(asked: Embedding, model: ServedModel, limit: int) -> PreparedEmbedding:
    """Tokenize every input. Raises InvalidRequest naming the field."""
    inputs: list[tuple[int, ...]] = []
    encode = partial(model.codec.encode, add_special_tokens=True)
    num_left = MAX_EMBEDDED_TOKENS
    for each in asked.inputs:
        inputs.append(_token_ids(each, "input", model, limit, encode))
        num_left -= len(inputs[-1])
        if num_left < 0:
            message = f"input: more than {MAX_EMBEDDED_TOKENS} tokens in one request; split it"
            raise InvalidRequest(message, "input", "invalid_value")
    return PreparedEmbedding(asked, tuple(inputs), current_principal.get().cache_salt)


def check_ids(token_ids: Sequence[int], field: str, model: ServedModel) -> None:
    """Check that the ids are in the vocabulary. Raises InvalidRequest."""
    if token_ids and not 0 <= min(token_ids) <= max(token_ids) < model.vocabulary_size:
        raise InvalidRequest(f"{field}: token ids are from 0 to {model.vocabulary_size - 1}", field, "invalid_value")


def _text(prompt: Prompt, field: str, model: ServedModel) -> str | tuple[int, ...]:
    if not isinstance(prompt, Conversation):
        return prompt
    if model.template is None:
        raise InvalidRequest(f"the model {model.name!r} has no chat template; use /v1/completions", field)
    return model.template.render(prompt, field)


def _check_size(num_tokens: int, field: str, limit: int) -> None:
    if num_tokens >= limit:
        raise _too_long(f"{num_tokens} tokens", field, limit)


def _too_long(size: str, field: str, limit: int) -> TooLong:
    message = f"{field}: {_context_is(limit)}, and {size} and at least one token of answer exceed it"
    return TooLong(message, field, size, limit)


def _context_is(limit: int) -> str:
    """OpenAI's wording, by which clients and proxies recognize that a conversation must be shortened."""
    return f"this model's maximum context length is {limit} tokens"


def _max_tokens(generation: Generation, num_prompt_tokens: int, limit: int, token_limit: int) -> int:
    max_tokens = min(_length(generation, num_prompt_tokens, limit), token_limit)
    if max_tokens < (generation.max_tokens or 0):
        raise too_many_logprobs(generation, token_limit)
    if generation.min_tokens > max_tokens:
        message = f"min_tokens ({generation.min_tokens}) must be at most {max_tokens}, the limit of the answer"
        raise InvalidRequest(message, "min_tokens", "invalid_value")
    return max_tokens


def _length(generation: Generation, num_prompt_tokens: int, limit: int) -> int:
    room = limit - num_prompt_tokens
    if generation.max_tokens is None:
        return min(room, generation.default_max_tokens or room)
    if generation.max_tokens > room:
        field = generation.max_tokens_field
        message = (
            f"{field}: {_context_is(limit)}, and {num_prompt_tokens} prompt tokens "
            f"and {generation.max_tokens} to generate exceed it"
        )
        raise TooLong(message, field, str(num_prompt_tokens), limit, generation.max_tokens)
    return generation.max_tokens


def _check_named_tokens(generation: Generation, model: ServedModel) -> None:
    biased = tuple(token for token, _ in generation.logit_bias)
    for field, tokens in (("stop_token_ids", generation.stop_token_ids), ("logit_bias", biased)):
        check_ids(tokens, field, model)


def _derive(seed: int, index: int) -> int:
    """Derive the seed of a choice. The first uses the request's seed, so n=1 equals the first choice of n=2."""
    if index == 0:
        return seed
    digest = hashlib.blake2b(index.to_bytes(4, "little"), key=seed.to_bytes(8, "little"), digest_size=8)
    return int.from_bytes(digest.digest(), "little")


def _sampling(
    generation: Generation, model: ServedModel, max_tokens: int, seed: int, grammar: Grammar | None
) -> SamplingParams:
    defaults = model.defaults
    repetition = generation.repetition_penalty
    if repetition is None:
        repetition = defaults.repetition_penalty
    wants_means = generation.best_of > generation.n
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=defaults.temperature if generation.temperature is None else generation.temperature,
        top_p=defaults.top_p if generation.top_p is None else generation.top_p,
        top_k=defaults.top_k if generation.top_k is None else generation.top_k,
        min_p=defaults.min_p if generation.min_p is None else generation.min_p,
        seed=seed,
        stop_token_ids=generation.stop_token_ids,
        ignore_eos=generation.ignore_eos,
        num_logprobs=0 if wants_means and generation.num_logprobs is None else generation.num_logprobs,
        frequency_penalty=generation.frequency_penalty,
        presence_penalty=generation.presence_penalty,
        repetition_penalty=repetition,
        logit_bias=generation.logit_bias,
        min_tokens=generation.min_tokens,
        grammar=grammar,
    )
