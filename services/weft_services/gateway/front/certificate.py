"""The certificate of the public listeners, one for HTTP and gRPC, read again when its files change."""

from __future__ import annotations

import asyncio
import logging
import ssl
from pathlib import Path

import grpc

from weft.config import ConfigError
from weft.rpc.tls import read_pem, reloaded

logger = logging.getLogger(__name__)
POLL_SECONDS = 1.0
# of a key that has one OpenSSL would ask the terminal, and wait
NO_PASSWORD = ""


class Certificate:
    """What clients are shown. Connections that are open keep what they were shown."""

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
        """The same for gRPC, which looks at the files itself."""
        return reloaded([self._cert, self._key], self._configuration, wants_client=False)

    async def run(self) -> None:
        """Notice new files, until cancelled. What could not be read for a moment is tried again."""
        trouble = ""
        while True:
            await asyncio.sleep(POLL_SECONDS)
            try:
                now = self._signature()
                if now != self._seen:
                    # what fails here would leave a context with a new certificate and no key
                    ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(self._cert, self._key, NO_PASSWORD)
                    self.context.load_cert_chain(self._cert, self._key, NO_PASSWORD)
                    self._seen = now
                    logger.info("certificate is read anew from=%s", self._cert)
                trouble = ""
            except (ConfigError, OSError) as error:  # ssl.SSLError is an OSError
                if str(error) != trouble:
                    logger.error("certificate cannot be read, the last one stays: %s", error)
                trouble = str(error)

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
    return stat.st_ino, stat.st_ctime_ns, stat.st_size  # the time of changes to who may read it, too
