"""`weft certs`: a certificate authority of one's own and certificates by it, for services and for trying out TLS."""

from __future__ import annotations

import datetime
import ipaddress
import os
import re
import shlex
import stat
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from weft.rpc.tls import MESH_NAME

CA_DAYS, CERT_DAYS = 3650, 365
LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")
# as it stands in a certificate; the first part may be a * for all
LABEL = "[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?"
DNS_NAME = re.compile(rf"(\*\.)?{LABEL}(\.{LABEL})*", re.IGNORECASE | re.ASCII)
Pair = tuple[x509.Certificate, ec.EllipticCurvePrivateKey]


def make_certs(folder: Path, hosts: list[str]) -> list[str]:
    """Create ca.pem and ca-key.pem unless they exist, and a new cert.pem and key.pem signed by them.

    Returns commands to run as root, where this user may not change a file's owner. Raises OSError or ValueError; also
    if one of the first two is missing, as a new authority would not be trusted by the other machines.
    """
    names = [_name(host) for host in dict.fromkeys((MESH_NAME, *LOCAL_NAMES, *hosts))]
    folder.mkdir(parents=True, exist_ok=True)
    ca_files = (folder / "ca.pem", folder / "ca-key.pem")
    missing = [path.name for path in ca_files if not path.exists()]
    if len(missing) == 1:
        advice = "put it back to have another certificate by the same authority, or name a new folder"
        raise ValueError(f"{folder} lacks {missing[0]}, which belongs to the other's: {advice}")
    if missing:
        ca = _make_ca()
        _save(ca, *ca_files)
    else:
        ca = _load(*ca_files)
    return _save(_make_member(ca, names), folder / "cert.pem", folder / "key.pem")


def _make_ca() -> Pair:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "Weft mesh CA")])
    usage = _usage(signs_certificates=True)
    builder = (
        _builder(name, name, key, CA_DAYS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )
    return builder.sign(key, hashes.SHA256()), key


def _make_member(ca: Pair, names: list[x509.GeneralName]) -> Pair:
    authority, authority_key = ca
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, MESH_NAME)])
    both = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
    issuer_key = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key())
    builder = (
        _builder(name, authority.subject, key, CERT_DAYS)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(both, critical=False)
        .add_extension(issuer_key, critical=False)
    )
    return builder.sign(authority_key, hashes.SHA256()), key


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, days: int
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        # clocks differ a little
        .not_valid_before(now - datetime.timedelta(minutes=5))
        .not_valid_after(now + datetime.timedelta(days=days))
    )


def _usage(signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        if DNS_NAME.fullmatch(host):
            return x509.DNSName(host)
    what = "expected a name, such as weft.example.com, or an address, without scheme and port"
    raise ValueError(f"--host {host}: {what}; letters of other scripts as in xn--mnchen-3ya.example")


def _load(cert: Path, key: Path) -> Pair:
    try:
        loaded = serialization.load_pem_private_key(key.read_bytes(), None)
    except TypeError as error:  # it has a password
        raise ValueError(f"{key}: {error}: decrypt it first, openssl ec -in FILE -out FILE does that") from error
    if not isinstance(loaded, ec.EllipticCurvePrivateKey):
        raise ValueError(f"{key}: expected an elliptic curve key, as `weft certs` makes them")
    authority = x509.load_pem_x509_certificate(cert.read_bytes())
    if authority.public_key() != loaded.public_key():  # what it signs, no peer would believe
        raise ValueError(f"{key} is not the key of {cert.name}, but another authority's: put its own back")
    if authority.not_valid_after_utc < datetime.datetime.now(datetime.UTC):  # nor that
        ended = f"{authority.not_valid_after_utc:%Y-%m-%d}"
        raise ValueError(f"{cert} ended on {ended}, and with it all that it signs: name a new folder")
    return authority, loaded


def _save(pair: Pair, cert: Path, key: Path) -> list[str]:
    """Write both files, then replace the old ones atomically, keeping their owner and mode.

    A new key is readable by its owner only. Returns the commands that this user may not run.
    """
    left: list[str] = []
    pem = serialization.Encoding.PEM
    private = pair[1].private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    partials = {path: path.with_name(f".{path.name}.{os.getpid()}") for path in (key, cert)}
    try:
        for path, content, mode in ((key, private, 0o600), (cert, pair[0].public_bytes(pem), 0o644)):
            # an interrupted run may have left one: in containers pids repeat
            partials[path].unlink(missing_ok=True)
            with os.fdopen(os.open(partials[path], os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
                file.write(content)
                left += _take_over(file.fileno(), path)
        for path, partial in partials.items():
            partial.replace(path)
    except OSError as error:
        meant = {str(partial): str(path) for path, partial in partials.items()}
        raise OSError(error.errno, error.strerror, meant.get(str(error.filename), error.filename)) from error
    finally:
        for partial in partials.values():
            partial.unlink(missing_ok=True)
    return left


def _take_over(fd: int, path: Path) -> list[str]:
    """Copy owner and mode of the file to replace: services may run as another user and must read the new one."""
    if not path.exists():
        return []
    before, now = path.stat(), os.fstat(fd)
    mode = stat.S_IMODE(before.st_mode)
    try:
        if (before.st_uid, before.st_gid) != (now.st_uid, now.st_gid):
            os.fchown(fd, before.st_uid, before.st_gid)
    except PermissionError:
        # do not copy the mode without the group: members of our own group could read the key
        quoted = shlex.quote(str(path))
        return [f"sudo chown {before.st_uid}:{before.st_gid} {quoted} && sudo chmod {mode:o} {quoted}"]
    os.fchmod(fd, mode)
    return []
