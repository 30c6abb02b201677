"""`weft doctor` where a file is there and cannot be used, or a library is not there."""

from __future__ import annotations

import importlib.util
import re
import shutil
import tomllib
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)
from packaging.requirements import Requirement

from weft.cli import certs
from weft.cli.doctor import machine
from weft.cli.doctor.finding import Severity, Subject
from weft.cli.doctor.model import check_model
from weft.cli.doctor.secrets import check_certificates
from weft.cli.mesh_registry import MeshRecord, recorded
from weft.cli.ports import free_ports

ROOT = Path(__file__).parents[3]
SHIPPED = ROOT / "models" / "weft-nano"


def test_settings_that_cannot_be_read_are_told_once_and_end_nothing(tmp_path: Path) -> None:
    shutil.copytree(SHIPPED, broken := tmp_path / "broken")
    (broken / "chat_template.jinja").unlink()
    (broken / "tokenizer_config.json").unlink()
    (broken / "tokenizer_config.json").symlink_to("/proc/self/mem")  # as of a disk that fails, for root too
    bad = [each for each in check_model(Subject({"broken": broken})) if each.level is not Severity.OK]
    assert [each.check for each in bad] == ["settings"]
    assert "Input/output error" in bad[0].says


def test_of_the_services_only_workers_are_said_to_need_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torch" else name)
    (found,) = (each for each in machine.check_versions(Subject({})) if each.check == "engine")
    assert found.level is Severity.WARNING
    assert found.says == "no torch: all services but workers run here"


def test_what_workers_are_said_to_need_is_imported_by_them() -> None:
    """Else an installation is called broken for want of what nobody misses."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extra = {Requirement(line).name for line in project["optional-dependencies"]["engine"]}
    code = "".join(path.read_text() for top in ("libs", "kernels") for path in (ROOT / top).rglob("*.py"))
    for name in {*machine.ENGINE, *extra}:
        assert re.search(rf"^(import|from) {name}\b", code, re.MULTILINE), name


def test_a_host_of_another_machine_is_told_though_a_mesh_of_ours_has_that_port(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    note = MeshRecord.of_this_process(8000, "http://127.0.0.1:8000", "127.0.0.1:1", {"gateway": "127.0.0.1:9000"})
    with recorded(note):
        found = list(machine.check_ports(Subject({}, host="192.0.2.1")))
    assert [each.level for each in found] == [Severity.FAILURE] * 2
    assert {each.advice for each in found} == {"choose another with --host"}


def test_one_port_for_http_and_grpc_is_told_as_by_up() -> None:
    (port,) = free_ports(1)
    found = [
        each for each in machine.check_ports(Subject({}, port=port, grpc_port=port)) if each.level is not Severity.OK
    ]
    assert [(each.level, each.advice) for each in found] == [(Severity.FAILURE, "choose another with --grpc-port")]


def test_an_authority_that_has_ended_wants_another_and_no_new_certificate_by_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(certs, "CA_DAYS", -1e-3)
    certs.make_certs(tmp_path, [])
    monkeypatch.setenv("WEFT_TLS_DIR", str(tmp_path))
    authority, certificate = check_certificates(Subject({}))
    assert authority.says.startswith("ca.pem ended on")
    assert "new folder" in authority.advice
    assert certificate.level is Severity.OK


def test_a_key_that_is_not_there_or_not_the_certificates_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("mesh", "other"):
        certs.make_certs(tmp_path / folder, [])
    monkeypatch.setenv("WEFT_TLS_DIR", str(tmp_path / "mesh"))
    (tmp_path / "other" / "key.pem").replace(tmp_path / "mesh" / "key.pem")
    *_, told = check_certificates(Subject({}))
    assert (told.level, "key.pem is not the key of cert.pem" in told.says) == (Severity.FAILURE, True)
    (tmp_path / "mesh" / "key.pem").unlink()
    *_, told = check_certificates(Subject({}))
    assert (told.level, "key.pem: No such file" in told.says) == (Severity.FAILURE, True)


def test_the_public_key_is_looked_at_as_the_gateway_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("own", "other"):
        certs.make_certs(tmp_path / folder, ["weft.example.com"])
    monkeypatch.setenv("WEFT_TLS_CERT", str(tmp_path / "own/cert.pem"))
    *_, told = check_certificates(Subject({}))
    assert (told.level, told.says) == (Severity.FAILURE, "WEFT_TLS_CERT and WEFT_TLS_KEY must be set together")
    monkeypatch.setenv("WEFT_TLS_KEY", str(tmp_path / "own/key.pem"))
    *_, told = check_certificates(Subject({}))
    assert (told.level, told.says.endswith("::1, weft.example.com")) == (Severity.OK, True)
    key = load_pem_private_key((tmp_path / "own/key.pem").read_bytes(), None)
    locked = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"word"))
    (tmp_path / "locked.pem").write_bytes(locked)
    for wrong in ("other/key.pem", "nowhere.pem", "locked.pem"):
        monkeypatch.setenv("WEFT_TLS_KEY", str(tmp_path / wrong))
        *_, told = check_certificates(Subject({}))
        assert (told.level, told.says.startswith(f"WEFT_TLS_KEY: {tmp_path / wrong}")) == (Severity.FAILURE, True)


def test_a_certificate_that_no_peer_would_believe_is_told_by_its_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is valid, and the key's, and made out to somebody else."""
    monkeypatch.setattr(certs, "MESH_NAME", "mesh.example.com")
    certs.make_certs(tmp_path, [])
    monkeypatch.setenv("WEFT_TLS_DIR", str(tmp_path))
    *_, told = check_certificates(Subject({}))
    assert (
        told.level,
        told.says.endswith("for mesh.example.com, localhost, 127.0.0.1, ::1, and not for weft.mesh"),
    ) == (
        Severity.FAILURE,
        True,
    )
