"""Requests that generate nothing: /v1/embeddings as in OpenAI's API, /tokenize and /detokenize as in vLLM's."""

from __future__ import annotations

import base64
import sys
from array import array
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import orjson
from pydantic import BeforeValidator, FailFast, Field

from weft.errors import InvalidRequest
from weft_services.gateway.dialects.body_checks import check_supported
from weft_services.gateway.dialects.openai_messages import (
    CHECKED,
    MAX_TOOLS,
    LenientModel,
    Message,
    as_function,
    for_template,
)
from weft_services.gateway.dialects.openai_requests import (
    ModelName,
    TemplateVariables,
    Tool,
    check_prompt,
    parse_body,
    session_hint,
)
from weft_services.gateway.generation import Conversation, Embedding, Prompt, TokenizeRequest
from weft_services.gateway.mesh.routing_hints import MAX_PRIORITY

MAX_TOKENS = 1_000_000
# Other unsupported chat fields have no effect on token ids.
TOKENIZE_NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {"chat_template": (), "continue_final_message": (False,)}
TokenId = Annotated[int, Field(ge=0)]


class TokenizeBody(TemplateVariables):
    """Body of POST /tokenize: a prompt, or messages for the chat template. The model is optional."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message] | None, *CHECKED] = None
    tools: Annotated[list[Tool] | None, Field(max_length=MAX_TOOLS)] = None
    add_generation_prompt: bool = True
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None

    def asked(self) -> TokenizeRequest:
        """Convert to the internal request. By default a prompt gets special tokens; a template writes its own."""
        check_supported(self.model_extra or {}, TOKENIZE_NEUTRAL_VALUES)
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequest("prompt: expected either prompt or messages", "prompt")
        prompt: Prompt = self.prompt or ""
        if self.messages is not None:
            messages, tools = for_template(self.messages), tuple(map(as_function, self.tools or ()))
            prompt = Conversation(messages, tools, self.variables(), self.add_generation_prompt)
        is_special = self.messages is None if self.add_special_tokens is None else self.add_special_tokens
        field = "prompt" if self.messages is None else "messages"
        return TokenizeRequest(self.model or "", prompt, field, is_special, bool(self.return_token_strs))


class DetokenizeBody(LenientModel):
    """Fields of the body of POST /detokenize."""

    model: str | None = None
    # An error takes a kilobyte, so stop at the first.
    tokens: Annotated[list[TokenId], Field(max_length=MAX_TOKENS), FailFast()]


def parse_tokenize(body: bytes) -> TokenizeRequest:
    """Parse a body. Raises InvalidRequest naming the field."""
    return parse_body(TokenizeBody, body).asked()


def parse_detokenize(body: bytes) -> tuple[str, list[int]]:
    """Return the model's name, empty if not given, and the ids. Raises InvalidRequest naming the field."""
    asked = parse_body(DetokenizeBody, body)
    return asked.model or "", asked.tokens


MAX_INPUTS = 2048
# vLLM's fields that would change the vectors or their encoding; other values than these are rejected.
EMBEDDING_NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "add_special_tokens": (True,),
    "cache_salt": (),
    "embed_dtype": ("float32",),
    "endianness": ("native", "little"),
    "normalize": (True,),
    "truncate_prompt_tokens": (),
    "use_activation": (True,),
}


class EmbeddingBody(LenientModel):
    """Fields of the body of POST /v1/embeddings."""

    model: ModelName = None
    input: Annotated[list[Any], BeforeValidator(lambda value: check_prompt(value, MAX_INPUTS))]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    priority: Annotated[int | None, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] = None

    def embedding(self) -> Embedding:
        """Convert to the internal request. Raises InvalidRequest for errors that types cannot express."""
        if self.dimensions is not None:
            message = "dimensions: a mean of hidden states cannot be shortened"
            raise InvalidRequest(message, "dimensions", "unsupported_parameter")
        extra = self.model_extra or {}
        check_supported(extra, EMBEDDING_NEUTRAL_VALUES)
        session = session_hint(extra.get("prompt_cache_key"), extra.get("session_id"), extra.get("user"))
        as_base64 = self.encoding_format == "base64"
        return Embedding(self.model or "", tuple(self.input), as_base64, session, self.priority)


def parse_embedding(body: bytes) -> Embedding:
    """Parse a body. Raises InvalidRequest naming the field."""
    return parse_body(EmbeddingBody, body).embedding()


def embedding_body(asked: Embedding, vectors: Sequence[tuple[float, ...]], num_tokens: int) -> bytes:
    written = as_base64 if asked.as_base64 else _as_json
    data = [
        {"object": "embedding", "index": index, "embedding": written(vector)} for index, vector in enumerate(vectors)
    ]
    usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    return orjson.dumps({"object": "list", "data": data, "model": asked.model, "usage": usage})


def _as_json(vector: tuple[float, ...]) -> orjson.Fragment:
    """Encode one vector at a time, so that the GIL is released between vectors."""
    return orjson.Fragment(orjson.dumps(vector))


def as_base64(vector: tuple[float, ...]) -> str:
    """Encode as base64 of little-endian float32."""
    numbers = array("f", vector)
    if sys.byteorder == "big":
        numbers.byteswap()
    return base64.b64encode(numbers.tobytes()).decode()
