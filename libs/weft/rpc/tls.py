"""Who a service of the mesh is, and which peers it believes: one folder with ca.pem, cert.pem and key.pem.

WEFT_TLS_DIR names it for every listener and channel of the process; without it, services talk in the clear.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

import grpc

from weft.config import ConfigError

logger = logging.getLogger(__name__)
VARIABLE = "WEFT_TLS_DIR"
# every certificate of a mesh is made out to this name: membership is what counts, not where a service runs
MESH_NAME = "weft.mesh"
FILES = ("ca.pem", "cert.pem", "key.pem")
Configuration = Callable[[], grpc.ServerCertificateConfiguration]
_last_read: dict[str, list[bytes]] = {}  # by folder, what channels have opened with


def channel_credentials() -> grpc.ChannelCredentials | None:
    """For calls to peers; None where the mesh has no certificates.

    Raises ConfigError naming a file that cannot be used; where all could be before, those stay: files are replaced one
    after the other, and a process that opens a channel meanwhile shall not end of it, nor the channel be of no use.
    """
    folder = os.environ.get(VARIABLE)
    if not folder:
        return None
    try:
        _last_read[folder] = read_folder(Path(folder))
    except ConfigError as error:
        if folder not in _last_read:
            raise
        logger.error("certificates cannot be read, the last ones stay: %s", error)
    ca, cert, key = _last_read[folder]
    return grpc.ssl_channel_credentials(ca, key, cert)


def peer_credentials() -> grpc.ServerCredentials | None:
    """For a listener that only peers with a certificate of the mesh may call; None where there are none."""
    folder = os.environ.get(VARIABLE)
    if not folder:
        return None
    paths = [Path(folder) / name for name in FILES]

    def configuration() -> grpc.ServerCertificateConfiguration:
        ca, cert, key = read_folder(Path(folder))
        return grpc.ssl_server_certificate_configuration([(key, cert)], ca)

    return reloaded(paths, configuration, wants_client=True)


def reloaded(paths: list[Path], configuration: Configuration, wants_client: bool) -> grpc.ServerCredentials:
    """Credentials that are read again when one of the files has changed; what cannot be read changes nothing.

    Raises ConfigError naming a file that cannot be read now.
    """
    first, seen = configuration(), _signature(paths)

    def fetch() -> grpc.ServerCertificateConfiguration | None:
        """Called by a thread of gRPC's at every handshake."""
        nonlocal seen
        try:
            now = _signature(paths)
            if now == seen:
                return None
            found = configuration()
        except (ConfigError, OSError) as error:
            logger.error("certificates cannot be read, the last ones stay: %s", error)
            return None
        seen = now  # not before: what could not be read for a moment is tried again
        logger.info("certificates are read anew from=%s", paths[0].parent)
        return found

    # the stubs do not know that None means that nothing has changed
    return grpc.dynamic_ssl_server_credentials(first, fetch, wants_client)  # type: ignore[arg-type]


def read_folder(folder: Path) -> list[bytes]:
    """Authority, certificate and key. Raises ConfigError naming the file that cannot be used."""
    from cryptography import x509
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    ca, cert, key = (read_pem(folder / name, VARIABLE) for name in FILES)
    try:
        owner = load_pem_private_key(key, None, unsafe_skip_rsa_key_validation=True).public_key()
        is_pair = x509.load_pem_x509_certificate(cert).public_key() == owner
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:  # the second of a key with a password
        raise ConfigError(f"{VARIABLE}: {folder}: cert.pem or key.pem cannot be used: {error}") from error
    if not is_pair:  # all that gRPC would say is that it cannot listen
        raise ConfigError(f"{VARIABLE}: {folder / 'key.pem'} is not the key of cert.pem")
    return [ca, cert, key]


def read_pem(path: Path, variable: str) -> bytes:
    """A PEM file's bytes. Raises ConfigError naming it and the variable that named it."""
    try:
        found = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{variable}: {path}: {error.strerror}") from error
    if b"-----BEGIN " not in found:
        raise ConfigError(f"{variable}: {path} is no PEM file")
    return found


def _signature(paths: list[Path]) -> list[tuple[int, int, int]]:
    """The times are those of changes to who may read them, too."""
    return [(stat.st_ino, stat.st_ctime_ns, stat.st_size) for stat in (path.stat() for path in paths)]
