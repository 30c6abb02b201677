"""The routes of the HTTP listener, and OpenAI's error bodies for everything that goes wrong around them."""

from __future__ import annotations

import logging
from http import HTTPStatus
from typing import Any

import orjson
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from weft.errors import EngineFailed, WeftError
from weft.metrics import REGISTRY
from weft_services.gateway.access.door import Door
from weft_services.gateway.access.visitor import visitor
from weft_services.gateway.dialects.anthropic_frames import MessageFrames, message_error
from weft_services.gateway.dialects.anthropic_requests import parse_messages
from weft_services.gateway.dialects.chat_frames import ChatFrames
from weft_services.gateway.dialects.frames import CompletionFrames
from weft_services.gateway.dialects.openai_requests import parse_chat, parse_completion
from weft_services.gateway.dialects.responses_frames import ResponseFrames
from weft_services.gateway.dialects.responses_requests import parse_responses
from weft_services.gateway.error_body import HttpError, error_body, status_of
from weft_services.gateway.front.edge import Doorkeeper, RequestIds
from weft_services.gateway.front.endpoints import Api, GenerationEndpoint
from weft_services.gateway.front.text_endpoints import text_routes
from weft_services.gateway.mesh.pipeline import Pipeline
from weft_services.gateway.mesh.prepare import check_model

logger = logging.getLogger(__name__)
APIS = {
    "/v1/chat/completions": Api("chat.completions", parse_chat, ChatFrames),
    "/v1/completions": Api("completions", parse_completion, CompletionFrames),
    "/v1/responses": Api("responses", parse_responses, ResponseFrames),
    "/v1/messages": Api("messages", parse_messages, MessageFrames, message_error),
}


def build_app(pipeline: Pipeline, door: Door, timeout_seconds: float) -> Starlette:
    """The whole HTTP face."""
    generating = [
        Route(path, GenerationEndpoint(pipeline, api, timeout_seconds), methods=["POST"]) for path, api in APIS.items()
    ]
    pages = _Pages(pipeline)
    routes = [
        *generating,
        *text_routes(pipeline),
        Route("/v1/models", pages.models),
        Route("/v1/models/{name:path}", pages.model),
        Route("/health", pages.health),
        Route("/ready", pages.ready),
        Route("/metrics", pages.metrics),
    ]
    handlers: dict[Any, Any] = {HTTPException: _http_error, WeftError: _weft_error, Exception: _unforeseen}
    middleware = [Middleware(RequestIds), Middleware(Doorkeeper, door=door)]
    app = Starlette(routes=routes, middleware=middleware, exception_handlers=handlers)
    app.router.redirect_slashes = False
    return app


class _Pages:
    """The small GET routes."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline

    async def models(self, request: Request) -> Response:
        is_theirs = visitor.get().may_use(self._pipeline.model.name)
        return _json({"object": "list", "data": [self._card()] if is_theirs else []})

    async def model(self, request: Request) -> Response:
        check_model(request.path_params["name"], self._pipeline.model)
        return _json(self._card())

    async def health(self, request: Request) -> Response:
        """That this runs at all says that the process and its loop are alive."""
        return _json({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        reasons = self._pipeline.reasons
        return _json({"ready": not reasons, "reasons": reasons}, 503 if reasons else 200)

    async def metrics(self, request: Request) -> Response:
        return Response(generate_latest(REGISTRY), media_type=CONTENT_TYPE_LATEST)

    def _card(self) -> dict[str, Any]:
        model, limit = self._pipeline.model, self._pipeline.max_context_tokens
        card = {"id": model.name, "object": "model", "created": model.created, "owned_by": "weft"}
        return {**card, "max_model_len": limit}


def _json(value: Any, status: int = 200) -> Response:
    return Response(orjson.dumps(value), status, media_type="application/json")


async def _weft_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, WeftError)
    return Response(error_body(error), status_of(error), media_type="application/json")


async def _http_error(request: Request, error: Exception) -> Response:
    """404 and 405 of the router."""
    assert isinstance(error, HTTPException)
    phrase = HTTPStatus(error.status_code).phrase.lower()
    reason = "unknown_url" if error.status_code == 404 else None
    body = error_body(HttpError(error.status_code, f"{request.method} {request.scope['path']}: {phrase}", reason))
    return Response(body, error.status_code, headers=error.headers, media_type="application/json")


async def _unforeseen(request: Request, error: Exception) -> Response:
    return Response(error_body(EngineFailed("internal error")), 500, media_type="application/json")
