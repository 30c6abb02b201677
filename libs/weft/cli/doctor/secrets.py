"""API keys and certificates that the environment names: can they be read, and how long do they last."""

from __future__ import annotations

import datetime
import os
import ssl
from collections.abc import Iterator
from pathlib import Path

from cryptography import x509

from weft.api_keys import BadKeys
from weft.cli.doctor import Finding, Severity, Subject
from weft.cli.keys import read_keys
from weft.errors import ConfigError
from weft.options import is_loopback
from weft.rpc.tls import FILES, MESH_NAME, VARIABLE, read_folder, read_pem

RENEW, BEGIN_ANEW = "weft certs FOLDER makes a new one", "weft certs makes another authority in a new folder"
SOON = datetime.timedelta(days=30)


def check_keys(subject: Subject) -> Iterator[Finding]:
    """Check the API keys of WEFT_KEYS, and that a public listener has some."""
    where = os.environ.get("WEFT_KEYS", "")
    if where:
        try:
            number = len(read_keys(where))
        except (BadKeys, OSError) as error:
            yield Finding("keys", Severity.FAILURE, f"WEFT_KEYS: {error}", "weft keys add NAME --keys FILE makes one")
        else:
            yield Finding("keys", Severity.OK, f"{number} API keys")
            if not is_loopback(subject.host) and not os.environ.get("WEFT_TLS_CERT"):
                says = f"without TLS they would cross the network to {subject.host} in the clear"
                advice = "WEFT_TLS_CERT and WEFT_TLS_KEY, or a proxy that has a certificate"
                yield Finding("keys", Severity.WARNING, says, advice)
    elif not is_loopback(subject.host) and os.environ.get("WEFT_ALLOW_UNAUTHENTICATED", "").lower() not in (
        "1",
        "true",
    ):
        advice = "weft keys add NAME --keys FILE, then WEFT_KEYS=FILE; or WEFT_ALLOW_UNAUTHENTICATED=1"
        yield Finding("keys", Severity.FAILURE, f"none: the gateway does not listen on {subject.host}", advice)
    else:
        yield Finding("keys", Severity.OK, f"none: every client that reaches {subject.host} may use the model")


def check_certificates(subject: Subject) -> Iterator[Finding]:
    """Check the certificates of the mesh and of the public listeners."""
    folder = os.environ.get(VARIABLE)
    if folder:
        found = [_certificate(VARIABLE, Path(folder) / name) for name in FILES if name != "key.pem"]
        yield from found
        if all(finding.level is not Severity.FAILURE for finding in found):
            yield from _key(Path(folder))
    else:
        yield Finding("certificates", Severity.OK, f"no {VARIABLE}: services talk to each other in the clear")
    yield from _public()


def _public() -> Iterator[Finding]:
    """Check the certificate of the public listeners and its key."""
    cert, key = os.environ.get("WEFT_TLS_CERT", ""), os.environ.get("WEFT_TLS_KEY", "")
    if bool(cert) != bool(key):
        says = "WEFT_TLS_CERT and WEFT_TLS_KEY must be set together"
        yield Finding("certificates", Severity.FAILURE, says, "set both, or neither")
    elif cert:
        found = _certificate("WEFT_TLS_CERT", Path(cert))
        yield found
        if found.level is not Severity.FAILURE:
            try:
                ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key, password="")
            except (OSError, ssl.SSLError) as error:
                says = f"WEFT_TLS_KEY: {key}: {error}"
                yield Finding(
                    "certificates", Severity.FAILURE, says, "set it to the certificate's key, without a password"
                )


def _names(certificate: x509.Certificate) -> list[str]:
    """Return the host names of a certificate."""
    try:
        found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    except x509.ExtensionNotFound:
        return []
    return [str(name.value) for name in found.value]


def _key(folder: Path) -> Iterator[Finding]:
    """Nothing where it is the certificate's."""
    try:
        read_folder(folder)
    except ConfigError as error:
        yield Finding("certificates", Severity.FAILURE, str(error), RENEW)


def _certificate(variable: str, path: Path) -> Finding:
    try:
        found = x509.load_pem_x509_certificate(read_pem(path, variable))
    except (ConfigError, ValueError) as error:
        return Finding("certificates", Severity.FAILURE, str(error), "weft certs FOLDER makes new ones")
    advice = BEGIN_ANEW if path.name == "ca.pem" else RENEW
    left = found.not_valid_after_utc - datetime.datetime.now(datetime.UTC)
    says = f"{path.name} is valid until {found.not_valid_after_utc:%Y-%m-%d}"
    if left < datetime.timedelta():
        says = f"{path.name} ended on {found.not_valid_after_utc:%Y-%m-%d}"
        return Finding("certificates", Severity.FAILURE, says, advice)
    if path.name != "ca.pem":
        names = _names(found)
        says += f", for {', '.join(names) or 'no name'}"
        if variable == VARIABLE and MESH_NAME not in names:  # no peer would believe it
            return Finding("certificates", Severity.FAILURE, f"{says}, and not for {MESH_NAME}", RENEW)
        if not names:
            return Finding("certificates", Severity.WARNING, f"{says}: clients refuse it", RENEW)
    return (
        Finding("certificates", Severity.WARNING, says, advice)
        if left < SOON
        else Finding("certificates", Severity.OK, says)
    )
