"""How many logprobs one request may ask for: all of them lie in the gateway's memory at once."""

from __future__ import annotations

import sys

from weft.errors import InvalidRequest
from weft_services.gateway.generation import Generation

# logprobs of prompt tokens and of their alternatives, in one request: some 10 MB of JSON
MAX_SCORES = 262_144
# of all answers to one request, where they are not streamed; as JSON some hundred bytes each
MAX_ANSWER_SCORES = 2_097_152


def check_prompt_scores(generation: Generation, num_tokens: int) -> None:
    """Those of prompts of so many tokens together. Raises InvalidRequest."""
    if generation.num_scored is None:
        return
    num_scores = num_tokens * (1 + generation.num_scored)
    if num_scores > MAX_SCORES:
        field = "logprobs" if generation.num_prompt_logprobs is None else "prompt_logprobs"
        message = f"{field}: {num_scores} logprobs of prompts, at most {MAX_SCORES} in one request"
        raise InvalidRequest(message, field, "invalid_value")


def most_scored_tokens(generation: Generation, num_sequences: int) -> int:
    """To how many tokens each of so many answers is bound by it."""
    if generation.stream or generation.in_pieces or generation.num_logprobs is None:
        return sys.maxsize
    return MAX_ANSWER_SCORES // (num_sequences * (1 + generation.num_logprobs))


def too_many_scores(generation: Generation, scored_tokens: int) -> InvalidRequest:
    """For who asks for longer answers than that."""
    field = generation.max_tokens_field
    what = f"at most {scored_tokens} tokens for each of so many answers with so many logprobs, unless they are streamed"
    return InvalidRequest(f"{field}: {what}", field, "invalid_value")
