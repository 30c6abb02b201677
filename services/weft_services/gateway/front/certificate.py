"""The TLS certificate of the public HTTP and gRPC listeners, reloaded when its files change."""

from __future__ import annotations

import asyncio
import logging
import ssl
from pathlib import Path

import grpc

from weft.errors import ConfigError
from weft.rpc.tls import read_pem, reloaded

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
