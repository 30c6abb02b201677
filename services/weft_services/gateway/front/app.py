"""The routes of the HTTP listener, and error bodies for everything that goes wrong around them."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import Any

import orjson
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from weft.errors import EngineFailed, WeftError
from weft.metrics import REGISTRY
from weft_services.gateway.access.door import Door
from weft_services.gateway.dialects.anthropic_frames import MessageFrames, message_error
from weft_services.gateway.dialects.anthropic_requests import parse_messages
from weft_services.gateway.dialects.chat_frames import ChatFrames
from weft_services.gateway.dialects.frames import CompletionFrames
from weft_services.gateway.dialects.openai_requests import parse_chat, parse_completion
from weft_services.gateway.dialects.responses_frames import ResponseFrames
from weft_services.gateway.dialects.responses_requests import parse_responses
from weft_services.gateway.error_body import HttpError, error_body, status_of
from weft_services.gateway.front import responses
from weft_services.gateway.front.cors import Cors
from weft_services.gateway.front.edge import Doorkeeper, Exchanges, is_anthropic
from weft_services.gateway.front.embeddings import EmbeddingEndpoint
from weft_services.gateway.front.endpoints import Api, GenerationEndpoint
from weft_services.gateway.front.kept import KeptAnswers
from weft_services.gateway.front.live import FleetEvents
from weft_services.gateway.front.model_cards import ModelCards
from weft_services.gateway.front.operator import DrainEndpoint, RoleEndpoint
from weft_services.gateway.front.page import PageFiles
from weft_services.gateway.front.paths import meant_path
from weft_services.gateway.front.text_endpoints import text_routes
from weft_services.gateway.mesh.pipeline import Pipeline

logger = logging.getLogger(__name__)
APIS = {
    "/v1/chat/completions": Api("chat.completions", parse_chat, ChatFrames),
    "/v1/completions": Api("completions", parse_completion, CompletionFrames),
    "/v1/responses": Api("responses", parse_responses, ResponseFrames),
    "/v1/messages": Api("messages", parse_messages, MessageFrames, message_error),
}


@dataclass(frozen=True, slots=True)
class Face:
    """What the settings say of the public listener. `is_alone`: there is no private one, so that operators come here
    too, and show their keys. `cors_origins`: of pages that may use the API from a browser."""

    timeout_seconds: float
    is_alone: bool
    cors_origins: tuple[str, ...] = ()


def build_app(pipeline: Pipeline, door: Door, kept: KeptAnswers | None, face: Face) -> ASGIApp:
    """The public face. Without `kept` no answer is kept."""
    timeout_seconds = face.timeout_seconds
    generating = [
        Route(path, GenerationEndpoint(pipeline, api, timeout_seconds), methods=["POST"])
        for path, api in APIS.items()
        if kept is None or path != responses.PATH
    ]
    if kept is not None:
        generating += responses.kept_routes(pipeline, kept, APIS[responses.PATH], timeout_seconds)
    pages, files, cards = _Pages(pipeline), PageFiles(), ModelCards(pipeline)
    routes = [
        *generating,  # what is asked of them in other ways than by POST comes this far
        Route("/", files.index),
        Route("/weft/page/{name}", files.file),
        Route("/weft/fleet/events", FleetEvents(pipeline), methods=["GET"]),
        Route("/weft/workers/{worker_id}/drain", DrainEndpoint(pipeline, undo=False), methods=["POST"]),
        Route("/weft/workers/{worker_id}/role", RoleEndpoint(pipeline), methods=["POST"]),
        Route("/weft/workers/{worker_id}/undrain", DrainEndpoint(pipeline, undo=True), methods=["POST"]),
        Route("/v1/embeddings", EmbeddingEndpoint(pipeline, timeout_seconds), methods=["POST"]),
        *text_routes(pipeline),
        Route("/v1/models", cards.all),
        Route("/v1/models/{name:path}", cards.one),
        *_health_routes(pages),
        *(_operator_routes(pages) if face.is_alone else []),
    ]
    direct = {route.path: route.endpoint for route in generating if isinstance(route.endpoint, GenerationEndpoint)}
    doorkeeper = Middleware(Doorkeeper, door=door, is_served=partial(_is_served, routes))
    app: ASGIApp = _application(routes, [doorkeeper, Middleware(Shortcut, endpoints=direct)])
    # around errors of every layer, and around each other: preflights have a line in the log, too
    return Exchanges(Cors(app, face.cors_origins) if face.cors_origins else app)


def build_private_app(pipeline: Pipeline) -> ASGIApp:
    """What operators and their tools see on a listener of its own, where no keys are asked for."""
    pages = _Pages(pipeline)
    return Exchanges(_application([*_health_routes(pages), *_operator_routes(pages)], []))


def _is_served(routes: list[Route], scope: Scope) -> bool:
    """True if the address is served, by any method."""
    return any(route.matches(scope)[0] is not Match.NONE for route in routes)


def _health_routes(pages: _Pages) -> list[Route]:
    return [Route("/health", pages.health), Route("/ready", pages.ready)]


def _operator_routes(pages: _Pages) -> list[Route]:
    return [Route("/metrics", pages.metrics)]


def _application(routes: list[Route], middleware: list[Middleware]) -> Starlette:
    handlers: dict[Any, Any] = {HTTPException: _http_error, WeftError: _weft_error, Exception: _unforeseen}
    app = Starlette(routes=routes, middleware=middleware, exception_handlers=handlers)
    app.router.redirect_slashes = False
    return app


class Shortcut:
    """Straight to endpoints that tell their clients of every error themselves, past what looks for routes and errors
    on the way to the others."""

    def __init__(self, app: ASGIApp, endpoints: Mapping[str, ASGIApp]) -> None:
        """`endpoints`: of POST requests, by path."""
        self._app = app
        self._endpoints = endpoints

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One exchange."""
        endpoint = self._endpoints.get(scope["path"]) if scope["method"] == "POST" else None
        await (endpoint or self._app)(scope, receive, send)


class _Pages:
    """The small GET routes."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline

    async def health(self, request: Request) -> Response:
        """That this runs at all says that the process and its loop are alive."""
        return _json({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        """503 when no model can be served; with 200 the reasons say which ones cannot."""
        is_ready = self._pipeline.is_ready
        return _json({"ready": is_ready, "reasons": self._pipeline.reasons}, 200 if is_ready else 503)

    async def metrics(self, request: Request) -> Response:
        return Response(generate_latest(REGISTRY), media_type=CONTENT_TYPE_LATEST)


def _json(value: Any, status: int = 200) -> Response:
    return Response(orjson.dumps(value), status, media_type="application/json")


async def _weft_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, WeftError)
    return Response(_told(request, error), status_of(error), media_type="application/json")


async def _http_error(request: Request, error: Exception) -> Response:
    """404 and 405 of the router."""
    assert isinstance(error, HTTPException)
    path = request.scope["path"]
    message = f"{request.method} {path}: {HTTPStatus(error.status_code).phrase.lower()}"
    if error.status_code == 404 and (meant := meant_path(path)) is not None:
        message += f"; the address here is {meant}"
    if allowed := (error.headers or {}).get("Allow"):
        message += f"; use {', '.join(sorted(allowed.split(', ')))}"
    told = HttpError(error.status_code, message, "unknown_url" if error.status_code == 404 else None)
    return Response(_told(request, told), error.status_code, headers=error.headers, media_type="application/json")


async def _unforeseen(request: Request, error: Exception) -> Response:
    return Response(_told(request, EngineFailed("internal error")), 500, media_type="application/json")


def _told(request: Request, error: WeftError) -> bytes:
    """In the words of the API whose path it is."""
    return message_error(error) if is_anthropic(request.scope) else error_body(error)
