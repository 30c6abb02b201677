"""Separate public and private listeners, TLS on the public ones, and certificate reloads."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from tests.services.gateway.conftest import END, MODEL_NAME, MakeBench
from tests.services.gateway.fakes import speaking
from weft.cli import health
from weft.cli.certs import make_certs
from weft.cli.health import http_answers
from weft.cli.layout import free_ports
from weft.errors import ConfigError
from weft.rpc import tls
from weft_mesh.v1 import inference_service_pb2 as pb
from weft_mesh.v1.inference_service_pb2_grpc import InferenceServiceStub
from weft_services.gateway.config import GatewayConfig
from weft_services.gateway.front.http_server import listen
from weft_services.gateway.front.listeners import Certificate


async def test_the_private_listener_has_what_the_public_one_has_not(
    bench: MakeBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "ATTEMPT_SECONDS", 20.0)
    async with bench(private_port=0) as b, httpx.AsyncClient(base_url=f"http://{b.gateway.private_address}") as private:
        assert b.gateway.private_address != b.gateway.http_address
        assert "weft_requests_total" in (await private.get("/metrics")).text
        assert (await b.http.get("/metrics")).status_code == 404
        for path in ("/v1/models", "/v1/chat/completions", "/tokenize"):
            assert (await private.get(path)).status_code == 404
        for client in (private, b.http):
            assert (await client.get("/health")).json() == {"status": "ok"}
            assert (await client.get("/ready")).json()["ready"] is True
        # as a container's health check asks
        assert await http_answers(f"http://{b.gateway.private_address}/ready")
        assert not await http_answers(f"http://{b.gateway.private_address}/v1/models")


async def test_both_public_faces_speak_tls_and_notice_a_new_certificate(bench: MakeBench, tmp_path: Path) -> None:
    make_certs(tmp_path, [])
    settings: Any = {"tls_cert": tmp_path / "cert.pem", "tls_key": tmp_path / "key.pem", "private_port": 0}
    async with bench(**settings) as b:
        with pytest.raises(httpx.RemoteProtocolError):
            await b.http.get("/health")
        await assert_served(b, tmp_path)
        old = await shown(b.gateway.http_address)
        make_certs(tmp_path, [])
        async with asyncio.timeout(15):
            while await shown(b.gateway.http_address) == old:  # noqa: ASYNC110 (files are read)
                await asyncio.sleep(0.1)
        await assert_served(b, tmp_path)
        assert await shown(b.gateway.grpc_address) == await shown(b.gateway.http_address) != old


async def test_a_certificate_whose_key_is_not_there_yet_changes_nothing(
    bench: MakeBench, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for folder in (tmp_path / "old", tmp_path / "new"):
        make_certs(folder, [])
    cert, key = tmp_path / "old" / "cert.pem", tmp_path / "old" / "key.pem"
    async with bench(tls_cert=cert, tls_key=key, private_port=0) as b:
        old = await shown(b.gateway.http_address)
        cert.write_bytes((tmp_path / "new" / "cert.pem").read_bytes())
        async with asyncio.timeout(15):
            while "keeping the last one" not in caplog.text:  # noqa: ASYNC110 (files are read)
                await asyncio.sleep(0.1)
        assert await shown(b.gateway.http_address) == old
        assert await shown(b.gateway.grpc_address) == old
        key.write_bytes((tmp_path / "new" / "key.pem").read_bytes())
        async with asyncio.timeout(15):
            while await shown(b.gateway.http_address) == old:  # noqa: ASYNC110 (files are read)
                await asyncio.sleep(0.1)


async def test_a_certificate_that_could_not_be_read_for_a_moment_is_read_a_second_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It would end with the one before it, and nobody would be served over HTTP any more."""
    caplog.set_level("INFO")
    monkeypatch.setattr("weft_services.gateway.front.listeners.POLL_SECONDS", 0.01)
    make_certs(tmp_path, [])
    certificate = Certificate(tmp_path / "cert.pem", tmp_path / "key.pem")
    make_certs(tmp_path, [])
    load, failures = ssl.SSLContext.load_cert_chain, [OSError("Too many open files")] * 3

    def sometimes(context: ssl.SSLContext, *files: Any) -> None:
        if failures:
            raise failures.pop()
        load(context, *files)

    monkeypatch.setattr(ssl.SSLContext, "load_cert_chain", sometimes)
    noticing = asyncio.create_task(certificate.run())
    try:
        async with asyncio.timeout(15):
            while "certificate reloaded" not in caplog.text:  # noqa: ASYNC110 (files are read)
                await asyncio.sleep(0.01)
    finally:
        noticing.cancel()
    assert caplog.text.count("keeping the last one") == 1, "told once"


def test_who_may_read_a_file_is_a_change_of_it(tmp_path: Path) -> None:
    make_certs(tmp_path, [])
    paths = tmp_path / "cert.pem", tmp_path / "key.pem"
    certificate = Certificate(*paths)
    before = tls._signature(list(paths)), certificate._signature()
    paths[1].chmod(0o640)
    after = tls._signature(list(paths)), certificate._signature()
    assert before[0] != after[0]
    assert before[1] != after[1]


async def assert_served(b: Any, folder: Path) -> None:
    b.decode.script = speaking([*b.ids("hello"), END])
    context = ssl.create_default_context(cafile=folder / "ca.pem")
    async with httpx.AsyncClient(base_url=f"https://{b.gateway.http_address}", verify=context) as client:
        answer = await client.post("/v1/completions", json={"model": MODEL_NAME, "prompt": "x"})
        assert answer.json()["choices"][0]["text"] == "hello"
    credentials = grpc.ssl_channel_credentials(await asyncio.to_thread((folder / "ca.pem").read_bytes))
    async with grpc.aio.secure_channel(b.gateway.grpc_address, credentials) as channel:
        stub: Any = InferenceServiceStub(channel)
        assert (await stub.ListModels(pb.ListModelsRequest(), timeout=20)).models[0].id == MODEL_NAME


async def shown(address: str) -> bytes:
    """The certificate that a client of that address sees."""
    host, _, port = address.rpartition(":")
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2", "http/1.1"])
    _, writer = await asyncio.open_connection(host, int(port), ssl=context)
    found: bytes = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    return found


def test_a_certificate_that_cannot_be_used_is_told_by_its_variable(model_dir: Path, tmp_path: Path) -> None:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    with pytest.raises(ConfigError, match="WEFT_TLS_KEY"):
        GatewayConfig(model=str(model_dir), scheduler_addr="127.0.0.1:1", tls_cert=cert)
    with pytest.raises(ConfigError, match="WEFT_TLS_CERT"):
        Certificate(cert, key)
    cert.write_text("no certificate")
    key.write_text("no key")
    with pytest.raises(ConfigError, match="WEFT_TLS_CERT"):
        Certificate(cert, key)


def test_ports_that_are_shared_have_to_be_named(model_dir: Path) -> None:
    with pytest.raises(ConfigError, match="WEFT_REUSE_PORT"):
        GatewayConfig(model=str(model_dir), scheduler_addr="127.0.0.1:1", http_port=0, reuse_port=True)


def test_a_port_is_shared_by_those_who_both_say_so_and_by_nobody_else() -> None:
    first = listen("127.0.0.1", 0, is_shared=True)
    port = first.getsockname()[1]
    with first, listen("127.0.0.1", port, is_shared=True) as second, contextlib.ExitStack() as clients:
        with pytest.raises(OSError, match="is the port taken"):
            listen("127.0.0.1", port)
        for _ in range(64):
            clients.enter_context(socket.create_connection(("127.0.0.1", port), timeout=5))
        for listener in (first, second):
            accepted, _ = listener.accept()  # raises BlockingIOError where none was dealt to it
            accepted.close()


async def test_gateways_that_share_ports_answer_there_together_and_one_after_the_other(bench: MakeBench) -> None:
    http_port, grpc_port = free_ports(2)
    ports: dict[str, Any] = {"http_port": http_port, "grpc_port": grpc_port, "reuse_port": True}
    async with bench(**ports) as first:
        async with bench(**ports) as second:
            with pytest.raises(OSError, match="is the port taken"):
                listen("127.0.0.1", http_port)
            assert first.gateway.http_address == second.gateway.http_address
            assert first.gateway.grpc_address == second.gateway.grpc_address
            for b in (first, second):
                assert (await b.http.get("/ready")).status_code == 200
        assert (await first.client.completions.create(model=MODEL_NAME, prompt="x")).choices
