"""Mutual TLS between services: one folder with ca.pem, cert.pem and key.pem.

WEFT_TLS_DIR names it for every listener and channel of the process. Without it, services use plain text.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

import grpc

from weft.errors import ConfigError

logger = logging.getLogger(__name__)
VARIABLE = "WEFT_TLS_DIR"
# Every certificate of a mesh carries this name: membership counts, not the host.
MESH_NAME = "weft.mesh"
FILES = ("ca.pem", "cert.pem", "key.pem")
Configuration = Callable[[], grpc.ServerCertificateConfiguration]
_last_read: dict[str, list[bytes]] = {}  # by folder, what channels have opened with


def channel_credentials() -> grpc.ChannelCredentials | None:
    """Return credentials for calls to peers; None if the mesh has no certificates.

    Raises ConfigError naming an unusable file. If an earlier read succeeded, its certificates stay in use instead:
    files are replaced one after the other, and a channel opened meanwhile must still work.
    """
    folder = os.environ.get(VARIABLE)
    if not folder:
        return None
    try:
        _last_read[folder] = read_folder(Path(folder))
    except ConfigError as error:
        if folder not in _last_read:
            raise
        logger.error("certificates unreadable, keeping the last ones error=%s", error)
    ca, cert, key = _last_read[folder]
    return grpc.ssl_channel_credentials(ca, key, cert)


def peer_credentials() -> grpc.ServerCredentials | None:
    """Return credentials for a listener that accepts only peers of the mesh; None if there are no certificates."""
    folder = os.environ.get(VARIABLE)
    if not folder:
        return None
    paths = [Path(folder) / name for name in FILES]

    def configuration() -> grpc.ServerCertificateConfiguration:
        ca, cert, key = read_folder(Path(folder))
        return grpc.ssl_server_certificate_configuration([(key, cert)], ca)

    return reloaded(paths, configuration, wants_client=True)


def reloaded(paths: list[Path], configuration: Configuration, wants_client: bool) -> grpc.ServerCredentials:
    """Return credentials that are read again when a file changes; an unreadable change is ignored.

    Raises ConfigError naming a file that cannot be read now.
    """
    first, seen = configuration(), _signature(paths)

    def fetch() -> grpc.ServerCertificateConfiguration | None:
        """Called by a gRPC thread at every handshake."""
        nonlocal seen
        try:
            now = _signature(paths)
            if now == seen:
                return None
            found = configuration()
        except (ConfigError, OSError) as error:
            logger.error("certificates unreadable, keeping the last ones error=%s", error)
            return None
        seen = now  # Set only after success, so that a failed read is retried.
        logger.info("certificates reloaded folder=%s", paths[0].parent)
        return found

    # The stubs do not declare that None means "unchanged".
    return grpc.dynamic_ssl_server_credentials(first, fetch, wants_client)  # type: ignore[arg-type]


def read_folder(folder: Path) -> list[bytes]:
    """Return authority, certificate and key. Raises ConfigError naming the unusable file."""
    from cryptography import x509
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    ca, cert, key = (read_pem(folder / name, VARIABLE) for name in FILES)
    try:
        owner = load_pem_private_key(key, None, unsafe_skip_rsa_key_validation=True).public_key()
        is_pair = x509.load_pem_x509_certificate(cert).public_key() == owner
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:  # TypeError: the key has a password.
        raise ConfigError(f"{VARIABLE}: {folder}: cert.pem or key.pem cannot be used: {error}") from error
    if not is_pair:  # gRPC would only report that it cannot listen.
        raise ConfigError(f"{VARIABLE}: {folder / 'key.pem'} is not the key of cert.pem")
    return [ca, cert, key]


def read_pem(path: Path, variable: str) -> bytes:
    """Return the bytes of a PEM file. Raises ConfigError naming the file and its variable."""
    try:
        found = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{variable}: {path}: {error.strerror}") from error
    if b"-----BEGIN " not in found:
        raise ConfigError(f"{variable}: {path} is no PEM file")
    return found


def _signature(paths: list[Path]) -> list[tuple[int, int, int]]:
    """Identify file versions; ctime also changes with the permissions."""
    return [(stat.st_ino, stat.st_ctime_ns, stat.st_size) for stat in (path.stat() for path in paths)]
