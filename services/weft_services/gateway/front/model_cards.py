"""GET /v1/models and /v1/models/{name}: the served models, in OpenAI's or Anthropic's format."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import orjson
from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import Response

from weft.errors import InvalidRequest
from weft_services.gateway.front.paths import is_anthropic
from weft_services.gateway.mesh.pipeline import Pipeline
from weft_services.gateway.model import ServedModel

# Page size of Anthropic's list: default and maximum.
DEFAULT_MODELS, MAX_MODELS = 20, 1000
Card = dict[str, Any]


class ModelCards:
    """Lists only the models that the request's key may use."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline

    async def all(self, request: Request) -> Response:
        models = list(self._pipeline.models)
        if is_anthropic(request.scope):
            return _json(_page([self._anthropic(model) for model in models], request.query_params))
        return _json({"object": "list", "data": [self._openai(model) for model in models]})

    async def one(self, request: Request) -> Response:
        model = self._pipeline.models.find(request.path_params["name"])
        return _json(self._anthropic(model) if is_anthropic(request.scope) else self._openai(model))

    def _openai(self, model: ServedModel) -> Card:
        """Return a card with the context length under the names of vLLM and of OpenRouter."""
        length = self._pipeline.max_context_tokens(model)
        card = {"id": model.name, "object": "model", "created": model.created, "owned_by": "weft"}
        return {**card, "max_model_len": length, "context_length": length}

    def _anthropic(self, model: ServedModel) -> Card:
        length = self._pipeline.max_context_tokens(model)
        created = datetime.fromtimestamp(model.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        card = {"type": "model", "id": model.name, "display_name": model.name, "created_at": created}
        return {**card, "lifecycle": "active", "max_input_tokens": length, "max_tokens": length}


def _page(cards: Sequence[Card], query: QueryParams) -> Card:
    """Return a page of Anthropic's list: the first models, or those next to an id.

    Raises InvalidRequest naming the parameter.
    """
    limit, after, before = query.get("limit", str(DEFAULT_MODELS)), query.get("after_id"), query.get("before_id")
    if not (limit.isascii() and limit.isdecimal() and len(limit) < 5 and 1 <= int(limit) <= MAX_MODELS):
        raise InvalidRequest(f"limit: expected 1 to {MAX_MODELS}", "limit")
    if after and before:
        raise InvalidRequest("before_id: cannot be combined with after_id; use one of them", "before_id")
    if before:
        rest = cards[: _place(cards, before, "before_id")]
        page = rest[-int(limit) :]
    else:
        rest = cards[_place(cards, after, "after_id") + 1 :] if after else cards
        page = rest[: int(limit)]
    ends = {"first_id": page[0]["id"], "last_id": page[-1]["id"]} if page else {"first_id": None, "last_id": None}
    return {"data": list(page), "has_more": len(page) < len(rest), **ends}


def _place(cards: Sequence[Card], name: str, field: str) -> int:
    for place, card in enumerate(cards):
        if card["id"] == name:
            return place
    raise InvalidRequest(f"{field}: no model {name[:80]!r}; use an id of the list", field)


def _json(value: Card) -> Response:
    return Response(orjson.dumps(value), media_type="application/json")
