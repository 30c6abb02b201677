"""mTLS between services, with real processes: who has a certificate of the mesh is heard, nobody else is."""

from __future__ import annotations

import asyncio
import ipaddress
import os
import re
import resource
import ssl
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from grpc_health.v1 import health_pb2, health_pb2_grpc
from typer.testing import CliRunner

from weft.cli import certs, health
from weft.cli.certs import make_certs
from weft.cli.health import grpc_serves
from weft.cli.main import app
from weft.errors import ConfigError
from weft.rpc.server import RpcServer
from weft.rpc.tls import channel_credentials, peer_credentials, reloaded


@pytest.fixture(autouse=True)
def patient_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allow two seconds for a TLS connection on a busy machine."""
    monkeypatch.setattr(health, "ATTEMPT_SECONDS", 20.0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_certs(tmp_path / "mesh", [])
    return tmp_path / "mesh"


@contextmanager
def scheduler(folder: Path) -> Iterator[str]:
    """Start a scheduler process and yield its address."""
    environ = {**os.environ, "WEFT_TLS_DIR": str(folder), "WEFT_PORT": "0", "WEFT_METRICS_PORT": "0"}
    command = [sys.executable, "-m", "weft_services.scheduler"]
    with subprocess.Popen(command, env=environ, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            found = next(match for line in process.stderr if (match := re.search(r"listening at=(\S+)", line)))
            yield found[1]
        finally:
            process.terminate()


async def test_a_service_hears_nobody_without_a_certificate_of_its_mesh(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_certs(tmp_path / "other", [])
    ca = (folder / "ca.pem").read_bytes()
    with scheduler(folder) as address:
        monkeypatch.setenv("WEFT_TLS_DIR", str(folder))
        assert await grpc_serves(address)
        strangers = [
            grpc.aio.insecure_channel(address),
            grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(ca)),
            grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(ca, *_pair(tmp_path / "other"))),
        ]
        for channel in strangers:
            async with channel:
                stub: Any = health_pb2_grpc.HealthStub(channel)
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await stub.Check(health_pb2.HealthCheckRequest(), timeout=10)
                assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        # a peer believes nobody either who has not got one
        monkeypatch.setenv("WEFT_TLS_DIR", str(tmp_path / "other"))
        assert not await grpc_serves(address)
        # a new certificate by the same authority is as good
        make_certs(folder, [])
        monkeypatch.setenv("WEFT_TLS_DIR", str(folder))
        assert await grpc_serves(address)


def _pair(folder: Path) -> tuple[bytes, bytes]:
    return (folder / "key.pem").read_bytes(), (folder / "cert.pem").read_bytes()


def test_a_missing_file_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_TLS_DIR", str(folder))
    (folder / "key.pem").write_text("no key")
    with pytest.raises(ConfigError, match=r"WEFT_TLS_DIR: .*key\.pem is no PEM file"):
        channel_credentials()
    (folder / "key.pem").unlink()
    with pytest.raises(ConfigError, match=r"WEFT_TLS_DIR: .*key\.pem: No such file"):
        channel_credentials()


async def test_a_peer_is_called_with_the_last_certificate_while_another_is_put_there(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with scheduler(folder) as address:
        monkeypatch.setenv("WEFT_TLS_DIR", str(folder))
        assert await grpc_serves(address)
        (folder / "key.pem").write_text("")
        assert await grpc_serves(address)


async def test_a_peer_is_called_with_the_last_certificate_between_the_replacing_of_key_and_certificate(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_certs(tmp_path / "next", [])
    with scheduler(folder) as address:
        monkeypatch.setenv("WEFT_TLS_DIR", str(folder))
        assert await grpc_serves(address)
        (tmp_path / "next" / "key.pem").replace(folder / "key.pem")
        assert await grpc_serves(address)


OTHERS_AND_LOCKED = ("key.pem", "is not the key of cert.pem"), ("ca-key.pem", "cannot be used")


@pytest.mark.parametrize(("name", "says"), OTHERS_AND_LOCKED)
def test_a_key_that_is_not_the_certificates_is_named_before_a_port_is_said_to_be_taken(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, says: str
) -> None:
    make_certs(tmp_path / "other", [])
    kind, locked = serialization.PrivateFormat.PKCS8, serialization.BestAvailableEncryption(b"secret")
    key = serialization.load_pem_private_key((folder / "key.pem").read_bytes(), None)
    (tmp_path / "other" / "ca-key.pem").write_bytes(key.private_bytes(serialization.Encoding.PEM, kind, locked))
    (tmp_path / "other" / name).replace(folder / "key.pem")
    monkeypatch.setenv("WEFT_TLS_DIR", str(folder))
    for credentials in (channel_credentials, peer_credentials):
        with pytest.raises(ConfigError, match=rf"WEFT_TLS_DIR: .*key\.pem {says}"):
            credentials()


async def test_a_new_certificate_that_could_not_be_read_for_a_moment_is_read_at_the_next_handshake(
    folder: Path,
) -> None:
    num_failures = 0

    def configuration() -> grpc.ServerCertificateConfiguration:
        nonlocal num_failures
        if num_failures:
            num_failures -= 1
            raise ConfigError("Too many open files")
        return grpc.ssl_server_certificate_configuration([_pair(folder)])

    rpc = RpcServer([])
    paths = [folder / "cert.pem", folder / "key.pem"]
    address = await rpc.start("127.0.0.1", 0, lambda: reloaded(paths, configuration, wants_client=False))
    where = "127.0.0.1", int(address.rpartition(":")[2])
    before = (folder / "cert.pem").read_text()
    make_certs(folder, [])
    num_failures = 1
    shown = [await asyncio.to_thread(ssl.get_server_certificate, where) for _ in range(2)]
    assert [each.strip() for each in shown] == [before.strip(), (folder / "cert.pem").read_text().strip()]
    await rpc.stop(0)


@pytest.mark.parametrize("kept_elsewhere", ["ca-key.pem", "ca.pem"])
def test_half_an_authority_is_not_replaced_by_another(folder: Path, kept_elsewhere: str) -> None:
    (folder / kept_elsewhere).unlink()
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(ValueError, match=f"lacks {kept_elsewhere}.*put it back"):
        make_certs(folder, [])
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_the_key_of_another_authority_makes_no_certificate(folder: Path, tmp_path: Path) -> None:
    make_certs(tmp_path / "other", [])
    (tmp_path / "other" / "ca-key.pem").replace(folder / "ca-key.pem")
    before = (folder / "cert.pem").read_bytes()
    with pytest.raises(ValueError, match=r"ca-key\.pem is not the key of ca\.pem"):
        make_certs(folder, [])
    assert (folder / "cert.pem").read_bytes() == before


def test_an_authority_that_has_ended_makes_no_certificate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(certs, "CA_DAYS", -1e-3)
    make_certs(tmp_path, [])
    before = (tmp_path / "cert.pem").read_bytes()
    with pytest.raises(ValueError, match=r"ca\.pem ended on \d{4}-\d\d-\d\d.*name a new folder"):
        make_certs(tmp_path, [])
    assert (tmp_path / "cert.pem").read_bytes() == before


@pytest.mark.parametrize("is_there", [True, False])
def test_a_key_is_not_replaced_where_there_is_no_room_for_its_certificate(folder: Path, is_there: bool) -> None:
    for path in () if is_there else list(folder.iterdir()):
        path.unlink()
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            make_certs(folder, [])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_an_authoritys_key_with_a_password_is_told(folder: Path) -> None:
    path = folder / "ca-key.pem"
    kind, locked = serialization.PrivateFormat.PKCS8, serialization.BestAvailableEncryption(b"secret")
    key = serialization.load_pem_private_key(path.read_bytes(), None)
    path.write_bytes(key.private_bytes(serialization.Encoding.PEM, kind, locked))
    result = CliRunner().invoke(app, ["certs", str(folder)])
    assert result.exit_code == 1
    assert "decrypt it first" in result.stderr


@pytest.mark.parametrize("host", ["https://a.example", "a.example:8000", "10.0.0.1/24", "", "a b", "m\u00fcn.example"])
def test_a_host_that_no_client_can_ask_for_is_named_and_nothing_made(tmp_path: Path, host: str) -> None:
    result = CliRunner().invoke(app, ["certs", str(tmp_path / "mesh"), "--host", "*.a-b.example", "--host", host])
    assert (result.exit_code, list(tmp_path.iterdir())) == (1, [])
    assert f"--host {host}: expected a name" in result.stderr


def test_private_keys_are_for_their_owner_and_the_authority_stays(folder: Path) -> None:
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert set(before) == {"ca.pem", "ca-key.pem", "cert.pem", "key.pem"}
    assert [(folder / name).stat().st_mode & 0o777 for name in ("key.pem", "ca-key.pem")] == [0o600, 0o600]
    make_certs(folder, ["gateway.example", "10.0.0.7"])
    after = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert {name for name in before if before[name] != after[name]} == {"cert.pem", "key.pem"}
    member, authority = (x509.load_pem_x509_certificate(after[name]) for name in ("cert.pem", "ca.pem"))
    member.verify_directly_issued_by(authority)
    names = member.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert {"weft.mesh", "localhost", "gateway.example"} <= set(names.get_values_for_type(x509.DNSName))
    assert ipaddress.ip_address("10.0.0.7") in names.get_values_for_type(x509.IPAddress)


def test_what_a_broken_off_renewal_has_left_is_no_hindrance(folder: Path) -> None:
    before = (folder / "key.pem").read_bytes()
    left = folder / f".key.pem.{os.getpid()}"
    left.write_bytes(b"half a key")
    left.chmod(0o644)
    make_certs(folder, [])
    assert (folder / "key.pem").read_bytes() != before
    assert (folder / "key.pem").stat().st_mode & 0o777 == 0o600
    assert not left.exists()


def test_a_renewed_key_belongs_to_whom_the_old_one_did(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "fchown", lambda fd, uid, gid: given.append((uid, gid)))
    (folder / "key.pem").chmod(0o640)
    assert make_certs(folder, []) == []
    assert (folder / "key.pem").stat().st_mode & 0o777 == 0o640
    assert given == []  # it was ours
    owner = os.getuid() + 1
    pretend_owner(monkeypatch, owner)
    assert make_certs(folder, []) == []
    assert given == [(owner, os.getgid())] * 2


def test_who_may_not_give_a_renewed_key_away_is_told_what_to_do(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int, uid: int, gid: int) -> None:
        raise PermissionError("Operation not permitted")

    monkeypatch.setattr(os, "fchown", refuse)
    (folder / "key.pem").chmod(0o640)
    before, owner = (folder / "key.pem").read_bytes(), os.getuid() + 1
    pretend_owner(monkeypatch, owner)
    result = CliRunner().invoke(app, ["certs", str(folder)])
    assert result.exit_code == 0
    named = f"{owner}:{os.getgid()} {folder / 'key.pem'}"
    assert f"sudo chown {named} && sudo chmod 640 {folder / 'key.pem'}" in result.output.replace("\n", "")
    assert (folder / "key.pem").read_bytes() != before
    # not for whoever is in the caller's group
    assert os.lstat(folder / "key.pem").st_mode & 0o777 == 0o600


def pretend_owner(monkeypatch: pytest.MonkeyPatch, uid: int) -> None:
    """Pretend that files belong to another user."""
    real = Path.stat

    def stat(path: Path, *, follow_symlinks: bool = True) -> os.stat_result:
        found = real(path, follow_symlinks=follow_symlinks)
        return os.stat_result((*found[:4], uid, *found[5:])) if path.suffix == ".pem" else found

    monkeypatch.setattr(Path, "stat", stat)
