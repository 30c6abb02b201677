"""`weft doctor` against this machine, a shipped model, a broken one, and machines that are short of something."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import socket
import subprocess
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)
from packaging.requirements import Requirement
from prometheus_client import CollectorRegistry, Counter, start_http_server
from tests.weft.cli.test_status import ListOnly
from tests.weft.weights.checkpoints import mount_line
from typer.testing import CliRunner

from weft.api_keys import ApiKey, digest_of, dump_keys, make_secret
from weft.cli import certs
from weft.cli.certs import make_certs
from weft.cli.doctor import Finding, Severity, Subject, machine, model
from weft.cli.doctor.machine import check_running
from weft.cli.doctor.model import check_model
from weft.cli.doctor.secrets import check_certificates, check_keys
from weft.cli.layout import Card, free_ports
from weft.cli.main import app
from weft.cli.mesh_registry import MeshRecord, recorded
from weft.errors import StorageUnavailable
from weft.weights import load
from weft_mesh.v1 import scheduler_service_pb2 as pb
from weft_mesh.v1 import scheduler_service_pb2_grpc as pb_grpc

SHIPPED = Path(__file__).parents[3] / "models/weft-nano"
MODELS = {"weft-nano": SHIPPED}
runner = CliRunner()


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No mesh of this machine, no settings of this shell, and nothing that takes long to load."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    for name in ("WEFT_KEYS", "WEFT_ALLOW_UNAUTHENTICATED", "WEFT_TLS_DIR", "WEFT_TLS_CERT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(machine, "mooncake_trouble", lambda: "")


def run(*arguments: str) -> tuple[int, dict[str, Finding]]:
    port, grpc_port = free_ports(2)
    options = ["--json", "--port", str(port), "--grpc-port", str(grpc_port), *arguments]
    result = runner.invoke(app, ["doctor", *options])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    parsed: dict[str, Any] = json.loads(result.stdout)
    found = {entry["check"]: Finding(**entry) for entry in parsed["findings"]}
    assert parsed["worst"] in list(Severity)
    assert result.exit_code == (parsed["worst"] == "failure")
    return result.exit_code, found


def test_the_shipped_model_is_found_whole_and_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "cards", list)
    monkeypatch.setattr(model, "available_bytes", lambda: 8 << 30)
    status, found = run("--model", str(SHIPPED))
    assert status == 0
    assert {found[check].level for check in ("model", "memory", "shared memory", "ports")} == {"ok"}
    assert found["engine"].says.startswith("torch 2.")
    assert {"python", "libraries", "gpu", "transport", "cores", "clock", "keys", "certificates"} <= set(found)


def test_draft_head_of_a_model_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (found,) = [each for each in model.check_model(Subject({"nano": SHIPPED})) if each.check == "draft"]
    assert found.says == "nano: a draft head for boundaries 1, 3, 5, 2.0 MiB"
    monkeypatch.setenv("WEFT_DRAFT", "none")
    assert "draft" not in [each.check for each in model.check_model(Subject({"nano": SHIPPED}))]
    monkeypatch.setenv("WEFT_DRAFT", str(tmp_path))
    (found,) = [each for each in model.check_model(Subject({"nano": SHIPPED})) if each.check == "draft"]
    assert (found.level, found.says) == ("failure", f"nano: {tmp_path}/config.json: no such file: workers do not start")
    assert found.advice == "name the directory of a draft head, or set WEFT_DRAFT=ngram"


@pytest.mark.parametrize(("options", "level"), [("rw,size=1g", "warning"), ("rw,huge=within_size", "ok")])
def test_large_models_want_shared_memory_in_large_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: str, level: str
) -> None:
    monkeypatch.setattr(load, "MOUNTS", mounts := tmp_path / "mountinfo")
    mounts.write_text(mount_line(Path("/proc"), "rw") + mount_line(Path("/dev/shm"), options))
    monkeypatch.setattr(model, "LARGE_PAGES_PAY", 1)
    (found,) = model.check_shared_memory(Subject(MODELS))
    assert found.level == level
    assert bool(found.advice) == (level == "warning")


def test_a_model_file_that_was_cut_short_is_named(tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(SHIPPED, broken)
    file = broken / "model.safetensors"
    with file.open("r+b") as opened:
        opened.truncate(file.stat().st_size // 2)
    (broken / "tokenizer.json").unlink()
    status, found = run("--model", str(broken))
    assert status == 1
    assert found["model"].level == Severity.FAILURE
    assert "model.safetensors" in found["model"].says
    assert found["model"].advice


def test_settings_that_keep_the_gateway_from_starting_are_named(tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(SHIPPED, broken)
    (broken / "tokenizer_config.json").write_text('{"chat_template"')
    (finding,) = (each for each in model.check_model(Subject({"broken": broken})) if each.check == "settings")
    assert finding.level == Severity.FAILURE
    assert "tokenizer_config.json" in finding.says


@pytest.mark.parametrize(
    ("status", "says", "advice"),
    [
        (-9, "tiny: decoding it was ended by a signal: Killed", "dmesg"),
        (1, "tiny: weft: model.weft: what was said", "look at the disk"),
        (2, "tiny: weft: model.weft: what was said", "make it again"),
    ],
)
def test_not_all_that_ends_decoding_is_the_bundles_fault(
    monkeypatch: pytest.MonkeyPatch, status: int, says: str, advice: str
) -> None:
    ended = subprocess.CompletedProcess([], status, "", "model.weft  12 %\nweft: model.weft: what was said")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: ended)
    finding = model._verified("tiny", Path("/somewhere"), is_deep=True)
    assert (finding.level, finding.says) == (Severity.FAILURE, says)
    assert advice in finding.advice


def test_storage_that_does_not_answer_is_no_fault_of_the_files(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_: Path) -> None:
        raise StorageUnavailable("/mnt/models/model.safetensors: Input/output error")

    monkeypatch.setattr(model, "read_checkpoint", fails)
    status, found = run("--model", str(SHIPPED))
    assert status == 1
    assert "Input/output error" in found["model"].says
    assert "try again" in found["model"].advice


def test_a_taken_port_is_a_failure_that_names_its_flag() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        (first, _) = machine.check_ports(Subject(MODELS, port=port, grpc_port=free_ports(1)[0]))
    assert first.level is Severity.FAILURE
    assert f"cannot listen on 127.0.0.1:{port} (" in first.says
    assert "--port" in first.advice


def test_too_little_memory_is_told_with_the_figures_of_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "cards", list)
    monkeypatch.setattr(model, "held_bytes", lambda: 0)
    levels = []
    for free in (1 << 20, 100 << 20, 64 << 30):
        monkeypatch.setattr(model, "available_bytes", lambda free=free: free)
        (finding,) = model.check_memory(Subject(MODELS, num_workers=1))
        assert "of weights and" in finding.says
        levels.append(finding.level)
    assert levels[0] is Severity.FAILURE
    assert levels[-1] is Severity.OK


def test_what_a_running_mesh_has_taken_is_not_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "cards", list)
    monkeypatch.setattr(model, "available_bytes", lambda: 1 << 20)
    monkeypatch.setattr(model, "shared_memory", lambda: (0, 1 << 30))
    monkeypatch.setattr(model, "held_bytes", lambda: 64 << 30)  # an image that is there is used again
    (memory,) = model.check_memory(Subject(MODELS, num_workers=1))
    (shared,) = model.check_shared_memory(Subject(MODELS, num_workers=1))
    assert {memory.level, shared.level} == {Severity.OK}
    monkeypatch.setattr(model, "held_bytes", lambda: 0)
    monkeypatch.setattr(model, "running_meshes", lambda: [object()])
    (memory,) = model.check_memory(Subject(MODELS, num_workers=1))
    assert memory.level is Severity.OK
    assert "a running mesh already holds its memory" in memory.says


def test_memory_check_uses_worker_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "cards", list)
    monkeypatch.setattr(model, "available_bytes", lambda: 1 << 30)
    levels = []
    for chunk_tokens in ("0", "1000000", "-1"):
        monkeypatch.setenv("WEFT_CHUNK_TOKENS", chunk_tokens)
        (finding,) = model.check_memory(Subject(MODELS, num_workers=1))
        levels.append(finding.level)
    assert levels == [Severity.OK, Severity.FAILURE, Severity.FAILURE]
    assert "WEFT_CHUNK_TOKENS='-1'" in finding.says


def test_a_gpu_that_torch_cannot_use_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    card = Card("NVIDIA H200", 140 << 30, 139 << 30, "570.1")
    monkeypatch.setattr(machine, "cards", lambda: [card])
    monkeypatch.setattr(machine, "CHILD_SECONDS", 0.0)
    assert next(machine.check_gpu(Subject(MODELS))).says.endswith("torch is not loaded within 0 s")
    for answer, level in (
        ("12.8 True", Severity.OK),
        ("None False", Severity.WARNING),
        ("12.8 False", Severity.FAILURE),
    ):
        ended = subprocess.CompletedProcess([], 0, stdout=f"{answer}\n", stderr="")
        monkeypatch.setattr(subprocess, "run", lambda *_, ended=ended, **__: ended)
        (finding,) = machine.check_gpu(Subject(MODELS))
        assert (finding.level, "H200" in finding.says) == (level, True)


def test_without_mooncake_the_transport_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    why = "Mooncake does not load (ImportError: libibverbs.so.1: no such file)"
    monkeypatch.setattr(machine, "mooncake_trouble", lambda: f"{why}: see the manual")
    (finding,) = machine.check_transport(Subject(MODELS))
    assert finding == Finding("transport", Severity.WARNING, f"gRPC, and no shared store: {why}", "see the manual")
    monkeypatch.setattr(machine, "mooncake_trouble", lambda: "Mooncake takes too long to load")
    (finding,) = machine.check_transport(Subject(MODELS))
    assert (finding.says.rpartition(": ")[2], finding.advice) == ("Mooncake takes too long to load", "")


def test_keys_and_certificates_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (finding,) = check_keys(Subject(MODELS, host="0.0.0.0"))
    assert finding.level is Severity.FAILURE
    monkeypatch.setenv("WEFT_ALLOW_UNAUTHENTICATED", "true")  # as the gateway reads it
    assert next(check_keys(Subject(MODELS, host="0.0.0.0"))).level is Severity.OK
    monkeypatch.setenv("WEFT_KEYS", str(tmp_path / "keys.json"))
    assert next(check_keys(Subject(MODELS))).level is Severity.FAILURE
    assert runner.invoke(app, ["keys", "add", "me"]).exit_code == 0
    assert next(check_keys(Subject(MODELS, host="0.0.0.0"))).says == "1 API keys"
    monkeypatch.setenv("WEFT_TLS_DIR", str(tmp_path / "tls"))
    assert {finding.level for finding in check_certificates(Subject(MODELS))} == {Severity.FAILURE}
    make_certs(tmp_path / "tls", [])
    assert {finding.level for finding in check_certificates(Subject(MODELS))} == {Severity.OK}
    (tmp_path / "tls/cert.pem").write_text("-----BEGIN CERTIFICATE-----\nno\n-----END CERTIFICATE-----\n")
    levels = [finding.level for finding in check_certificates(Subject(MODELS))]
    assert levels == [Severity.OK, Severity.FAILURE]


def test_an_old_library_and_a_missing_one_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "requires", lambda _: ["grpcio>=999.1", "no-such-thing>=1"])
    found = {finding.check: finding for finding in machine.check_versions(Subject(MODELS))}
    assert found["libraries"].level is Severity.FAILURE
    assert "is older than 999.1" in found["libraries"].says
    assert "no-such-thing is missing" in found["libraries"].says


@contextmanager
def running(transports: list[str], metrics_address: str) -> Iterator[None]:
    """A mesh of this user with such workers."""
    server = grpc.server(ThreadPoolExecutor(1))
    hellos = [pb.WorkerHello(metrics_address=metrics_address, transport=each) for each in transports]
    fleet = ListOnly([[pb.WorkerStatus(hello=hello) for hello in hellos]])
    pb_grpc.add_FleetServiceServicer_to_server(fleet, server)
    scheduler = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        with recorded(MeshRecord(os.getpid(), 1.0, 8000, "http://127.0.0.1:8000", scheduler, {})):
            yield
    finally:
        server.stop(None).wait()


def test_a_mesh_that_runs_is_asked_which_way_its_blocks_go() -> None:
    registry = CollectorRegistry()
    pulled = Counter("weft_kv_transfer_bytes", "x", ["transport"], registry=registry)
    metrics, thread = start_http_server(0, "127.0.0.1", registry)
    assert list(check_running(Subject(MODELS))) == []
    for transports, way, megabytes, level, word in (
        (["mooncake"], "local", 0, Severity.OK, "no block was handed over yet; to other machines mooncake"),
        (["grpc", "mooncake"], "local", 1, Severity.WARNING, "2.0 MiB by local; to other machines grpc and mooncake"),
        (["grpc"], "grpc", 3, Severity.OK, "3.0 MiB by grpc, 1.0 MiB by local; to other machines grpc"),
        (["mooncake"], "mooncake", 2, Severity.WARNING, "3.0 MiB by grpc, 2.0 MiB by mooncake, 1.0 MiB by local"),
    ):
        pulled.labels(way).inc(megabytes << 20)
        with running(transports, f"127.0.0.1:{metrics.server_port}"):
            (finding,) = check_running(Subject(MODELS))
        assert (finding.check, finding.level) == ("mesh", level)
        assert word in finding.says
    metrics.shutdown()
    metrics.server_close()
    thread.join()


def test_a_mesh_that_does_not_answer_is_told() -> None:
    (port,) = free_ports(1)
    with recorded(MeshRecord(os.getpid(), 1.0, 8000, "http://127.0.0.1:8000", f"127.0.0.1:{port}", {})):
        (finding,) = check_running(Subject(MODELS))
    assert finding.level is Severity.WARNING
    assert "no scheduler answers" in finding.says


def test_keys_in_the_clear_are_warned_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "keys.json"
    path.write_text(dump_keys([ApiKey("me", digest_of(make_secret()))]))
    monkeypatch.setenv("WEFT_KEYS", str(path))
    assert [each.level for each in check_keys(Subject(MODELS))] == [Severity.OK]
    assert [each.level for each in check_keys(Subject(MODELS, host="10.0.0.5"))] == [Severity.OK, Severity.WARNING]
    monkeypatch.setenv("WEFT_TLS_CERT", "cert.pem")
    assert [each.level for each in check_keys(Subject(MODELS, host="10.0.0.5"))] == [Severity.OK]


ROOT = Path(__file__).parents[3]


def test_unreadable_settings_are_reported_once(tmp_path: Path) -> None:
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


def test_foreign_host_fails_even_if_our_mesh_has_the_port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_expired_authority_needs_a_new_authority(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_certificate_without_mesh_name_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
