"""All listeners of the gateway: public HTTP and gRPC, with or without TLS, and the private HTTP listener."""

from __future__ import annotations

import asyncio

import grpc

from weft.rpc.server import RpcServer
from weft_services.gateway.access.authentication import Authenticator
from weft_services.gateway.config import GatewayConfig
from weft_services.gateway.front.app import PublicListenerOptions, build_app, build_private_app
from weft_services.gateway.front.certificate import Certificate
from weft_services.gateway.front.grpc_service import LISTENER_OPTIONS, SERVICE_NAME, Admission, add_inference_service
from weft_services.gateway.front.http_server import HttpServer, listen
from weft_services.gateway.front.response_store import ResponseStore
from weft_services.gateway.mesh.pipeline import Pipeline

FLUSH_SECONDS = 1.0


class Listeners:
    """Binds HTTP ports at construction, so that early clients wait; `start` binds the gRPC port."""

    def __init__(
        self, config: GatewayConfig, pipeline: Pipeline, authenticator: Authenticator, store: ResponseStore | None
    ) -> None:
        """Raises ConfigError for a certificate that cannot be used, BindError if a port is taken."""
        self._config = config
        self._certificate = Certificate(config.tls_cert, config.tls_key) if config.tls_cert and config.tls_key else None
        self._serving: list[asyncio.Task[None]] = []
        self._watching: asyncio.Task[None] | None = None
        context = self._certificate.context if self._certificate else None
        has_private = config.private_port is not None
        grace_seconds = config.grace_seconds + FLUSH_SECONDS
        options = PublicListenerOptions(config.request_timeout_seconds, not has_private, config.allowed_origins)
        app = build_app(pipeline, authenticator, store, options)
        self.http = HttpServer(app, listen(config.host, config.http_port, config.reuse_port), grace_seconds, context)
        self.private: HttpServer | None = None
        if config.private_port is not None:
            listener = listen(config.private_host, config.private_port)
            self.private = HttpServer(build_private_app(pipeline), listener, grace_seconds)
        grpc_options = (*LISTENER_OPTIONS, ("grpc.so_reuseport", int(config.reuse_port)))
        self.rpc = RpcServer([SERVICE_NAME], grpc_options, [Admission(pipeline, authenticator, SERVICE_NAME)])
        add_inference_service(self.rpc.server, pipeline, config.request_timeout_seconds)
        self._grpc_address = ""

    @property
    def addresses(self) -> tuple[str, str, str]:
        """host:port of public HTTP, gRPC and private HTTP. Without a private listener the last is the public one."""
        public = f"{self._config.host}:{self.http.port}"
        private = f"{self._config.private_host}:{self.private.port}" if self.private else public
        return public, self._grpc_address, private

    async def start(self, group: asyncio.TaskGroup) -> None:
        """Serve in tasks of the group. Raises BindError."""
        self._grpc_address = await self.rpc.start(self._config.host, self._config.grpc_port, self._grpc_credentials)
        self._serving = [group.create_task(http.serve_until_stopped(), name="http") for http in self._servers()]
        if self._certificate is not None:
            self._watching = group.create_task(self._certificate.run(), name="certificate")

    def refuse(self) -> None:
        """Stop accepting HTTP connections; gRPC continues until `stop`."""
        for http in self._servers():
            http.should_exit = True

    async def stop(self) -> None:
        """Send remaining data, then close all connections."""
        await self.rpc.stop(FLUSH_SECONDS)
        await asyncio.wait(self._serving)
        if self._watching is not None:
            self._watching.cancel()

    def _servers(self) -> list[HttpServer]:
        return [self.http] if self.private is None else [self.http, self.private]

    def _grpc_credentials(self) -> grpc.ServerCredentials | None:
        return self._certificate.grpc_credentials() if self._certificate else None
