"""The routes of the HTTP listeners, and the error bodies of routing errors and unexpected exceptions."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Scope

from weft.errors import EngineFailed, WeftError
from weft_services.gateway.access.authentication import Authenticator
from weft_services.gateway.dialects.anthropic_encoder import MessagesEncoder
from weft_services.gateway.dialects.anthropic_requests import parse_messages
from weft_services.gateway.dialects.openai_encoders import ChatEncoder, CompletionEncoder
from weft_services.gateway.dialects.openai_requests import parse_chat, parse_completion
from weft_services.gateway.dialects.responses_encoder import ResponsesEncoder
from weft_services.gateway.dialects.responses_requests import parse_responses
from weft_services.gateway.error_body import HttpError, status_of
from weft_services.gateway.front import responses
from weft_services.gateway.front.asgi_io import error_encoder, suggested_path
from weft_services.gateway.front.endpoints import ApiSpec, EmbeddingEndpoint, GenerationEndpoint
from weft_services.gateway.front.fleet_endpoints import fleet_routes
from weft_services.gateway.front.local_endpoints import health_routes, local_routes, metrics
from weft_services.gateway.front.middleware import AuthMiddleware, CorsMiddleware, FastRoutes, RequestIdMiddleware
from weft_services.gateway.front.request_record import ApiEndpoint
from weft_services.gateway.front.responses import ResponseStore
from weft_services.gateway.mesh.pipeline import Pipeline

logger = logging.getLogger(__name__)
APIS = {
    "/v1/chat/completions": ApiSpec(ApiEndpoint.CHAT, parse_chat, ChatEncoder),
    "/v1/completions": ApiSpec(ApiEndpoint.COMPLETIONS, parse_completion, CompletionEncoder),
    "/v1/responses": ApiSpec(ApiEndpoint.RESPONSES, parse_responses, ResponsesEncoder),
    "/v1/messages": ApiSpec(ApiEndpoint.MESSAGES, parse_messages, MessagesEncoder),
}

METRICS_ROUTE = Route("/metrics", metrics)


@dataclass(frozen=True, slots=True)
class PublicListenerOptions:
    """Settings of the public listener.

    - `is_alone`: there is no private listener, so operators use this one, with their keys.
    - `cors_origins`: origins of web pages that may use the API.
    """

    timeout_seconds: float
    is_alone: bool
    cors_origins: tuple[str, ...] = ()


def build_app(
    pipeline: Pipeline, authenticator: Authenticator, store: ResponseStore | None, options: PublicListenerOptions
) -> ASGIApp:
    """Build the public application. Without a `store` the Responses API stores nothing."""
    timeout_seconds = options.timeout_seconds
    generating = [
        Route(path, GenerationEndpoint(pipeline, api, timeout_seconds), methods=["POST"])
        for path, api in APIS.items()
        if store is None or path != responses.PATH
    ]
    if store is not None:
        generating += responses.stored_response_routes(pipeline, store, APIS[responses.PATH], timeout_seconds)
    routes = [
        *generating,  # requests with other methods than POST reach these
        *fleet_routes(pipeline),
        Route("/v1/embeddings", EmbeddingEndpoint(pipeline, timeout_seconds), methods=["POST"]),
        *local_routes(pipeline),
        *health_routes(pipeline),
        *([METRICS_ROUTE] if options.is_alone else []),
    ]
    direct = {route.path: route.endpoint for route in generating if isinstance(route.endpoint, GenerationEndpoint)}
    doorkeeper = Middleware(AuthMiddleware, authenticator=authenticator, is_served=partial(_is_served, routes))
    app: ASGIApp = _application(routes, [doorkeeper, Middleware(FastRoutes, endpoints=direct)])
    # Outermost, so that errors of every layer get an id and CORS headers, and preflights a log line.
    return RequestIdMiddleware(CorsMiddleware(app, options.cors_origins) if options.cors_origins else app)


def build_private_app(pipeline: Pipeline) -> ASGIApp:
    """Build the application of the private listener, for operators and their tools. It requires no keys."""
    return RequestIdMiddleware(_application([*health_routes(pipeline), METRICS_ROUTE], []))


def _is_served(routes: list[Route], scope: Scope) -> bool:
    """Return whether the address is served, by any method."""
    return any(route.matches(scope)[0] is not Match.NONE for route in routes)


def _application(routes: list[Route], middleware: list[Middleware]) -> Starlette:
    handlers: dict[Any, Any] = {HTTPException: _http_error, WeftError: _weft_error, Exception: _unforeseen}
    app = Starlette(routes=routes, middleware=middleware, exception_handlers=handlers)
    app.router.redirect_slashes = False
    return app


async def _weft_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, WeftError)
    return Response(_encode(request, error), status_of(error), media_type="application/json")


async def _http_error(request: Request, error: Exception) -> Response:
    """Answer the router's 404 and 405."""
    assert isinstance(error, HTTPException)
    path = request.scope["path"]
    message = f"{request.method} {path}: {HTTPStatus(error.status_code).phrase.lower()}"
    if error.status_code == 404 and (meant := suggested_path(path)) is not None:
        message += f"; the address here is {meant}"
    if allowed := (error.headers or {}).get("Allow"):
        message += f"; use {', '.join(sorted(allowed.split(', ')))}"
    http_error = HttpError(error.status_code, message, "unknown_url" if error.status_code == 404 else None)
    return Response(
        _encode(request, http_error), error.status_code, headers=error.headers, media_type="application/json"
    )


async def _unforeseen(request: Request, error: Exception) -> Response:
    return Response(_encode(request, EngineFailed("internal error")), 500, media_type="application/json")


def _encode(request: Request, error: WeftError) -> bytes:
    return error_encoder(request.scope)(error)
