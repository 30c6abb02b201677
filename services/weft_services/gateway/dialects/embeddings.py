"""OpenAI's /v1/embeddings: the request, and the answer as numbers or as base64 of little-endian floats."""

from __future__ import annotations

import base64
import sys
from array import array
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import orjson
from pydantic import BeforeValidator, Field

from weft.errors import InvalidRequest
from weft_services.gateway.dialects.openai_messages import LenientModel
from weft_services.gateway.dialects.openai_requests import ModelName, check_prompt, parse_body, session_hint
from weft_services.gateway.dialects.unsupported_fields import check_supported
from weft_services.gateway.generation import Embedding
from weft_services.gateway.mesh.routing_hints import MAX_PRIORITY

MAX_INPUTS = 2048
# vLLM's fields that would change the vectors or their encoding; other values than these are rejected.
NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
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
        check_supported(extra, NEUTRAL_VALUES)
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
