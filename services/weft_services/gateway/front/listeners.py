"""All listeners of the gateway: public HTTP and gRPC, with or without TLS, and the private HTTP listener."""

from __future__ import annotations

import asyncio
import logging
import ssl
from pathlib import Path

import grpc

from weft.errors import ConfigError
from weft.rpc.server import RpcServer
from weft.rpc.tls import read_pem, reloaded
from weft_services.gateway.access.authentication import Authenticator
from weft_services.gateway.config import GatewayConfig
from weft_services.gateway.front.app import PublicListenerOptions, build_app, build_private_app
from weft_services.gateway.front.grpc_service import LISTENER_OPTIONS, SERVICE_NAME, Admission, add_inference_service
from weft_services.gateway.front.http_server import HttpServer, listen
from weft_services.gateway.front.responses import ResponseStore
from weft_services.gateway.mesh.pipeline import Pipeline

logger = logging.getLogger(__name__)
POLL_SECONDS = 1.0
# OpenSSL asks the terminal for the password of an encrypted key and blocks; an empty password fails instead.
NO_PASSWORD = ""


class Certificate:
    """The current certificate. Open connections keep the one they started with."""

    def __init__(self, cert: Path, key: Path) -> None:
        """Raises ConfigError naming a file that cannot be used."""
        self._cert, self._key = cert, key
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_2
        self._seen = self._signature()
        try:
            self.context.load_cert_chain(cert, key, NO_PASSWORD)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(f"WEFT_TLS_CERT={cert}, WEFT_TLS_KEY={key}: {error}") from error

    def grpc_credentials(self) -> grpc.ServerCredentials:
        """Return credentials for gRPC, which checks the files itself."""
        return reloaded([self._cert, self._key], self._configuration, wants_client=False)

    async def run(self) -> None:
        """Reload changed files until cancelled. A failed read is retried."""
        problem = ""
        while True:
            await asyncio.sleep(POLL_SECONDS)
            try:
                now = self._signature()
                if now != self._seen:
                    # Try a fresh context first: a failure in ours would leave it with a new certificate and no key.
                    ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(self._cert, self._key, NO_PASSWORD)
                    self.context.load_cert_chain(self._cert, self._key, NO_PASSWORD)
                    self._seen = now
                    logger.info("certificate reloaded path=%s", self._cert)
                problem = ""
            except (ConfigError, OSError) as error:  # ssl.SSLError is an OSError
                if str(error) != problem:
                    logger.error("certificate not reloaded, keeping the last one error=%s", error)
                problem = str(error)

    def _configuration(self) -> grpc.ServerCertificateConfiguration:
        pair = (read_pem(self._key, "WEFT_TLS_KEY"), read_pem(self._cert, "WEFT_TLS_CERT"))
        return grpc.ssl_server_certificate_configuration([pair])

    def _signature(self) -> list[int]:
        try:
            return [value for path in (self._cert, self._key) for value in _times(path)]
        except OSError as error:
            raise ConfigError(f"WEFT_TLS_CERT, WEFT_TLS_KEY: {error.filename}: {error.strerror}") from error


def _times(path: Path) -> tuple[int, int, int]:
    stat = path.stat()
    return stat.st_ino, stat.st_ctime_ns, stat.st_size  # ctime also changes with the file's permissions


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
