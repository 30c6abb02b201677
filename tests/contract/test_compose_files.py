"""What compose.yaml and what stands beside it say: schema, variables, ports, images, mounts."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.contract.compose_files import COMPOSE, OVERRIDE, ROOT, all_services, is_weft, plain_services

from weft.config import variable_name
from weft_services.kvstore.config import KvStoreConfig


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    """The services of a plain `docker compose up`."""
    return plain_services()


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
    host, own = "${WEFT_OBSERVABILITY_HOST:-127.0.0.1}", f"${{WEFT_{name.upper()}_PORT:-{port}}}"
    assert service["ports"] == [f"{host}:{own}:{port}"]


def test_nobody_can_log_in_to_grafana() -> None:
    grafana = yaml.safe_load(COMPOSE.read_text())["services"]["grafana"]
    assert grafana["environment"]["GF_AUTH_DISABLE_LOGIN_FORM"] == "true"
    assert grafana["environment"]["GF_AUTH_BASIC_ENABLED"] == "false"
    assert grafana["environment"]["GF_AUTH_ANONYMOUS_ORG_ROLE"] == "Viewer"


def test_the_gateway_cannot_be_started_without_keys(services: dict[str, Any]) -> None:
    assert mounted(services["gateway"])["/keys"]["source"] == "WEFT_KEYS_DIR"
    assert "${WEFT_KEYS_DIR:?" in COMPOSE.read_text()
    assert services["gateway"]["environment"]["WEFT_KEYS"].startswith("/keys/")


def mounted(service: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Of a service's mounts those that are written out, by where they are."""
    return {volume["target"]: volume for volume in service.get("volumes", ()) if isinstance(volume, dict)}


def test_folders_of_this_host_may_have_bare_names() -> None:
    """`keys:/keys` would be a volume of that name; and a folder that is not there is an error, and not made by root."""
    named = re.compile(r"WEFT_(KEYS|CERTS|MODEL)_DIR")
    for path in (COMPOSE, OVERRIDE):
        text = path.read_text()
        assert len(re.findall(r"source: \$\{" + named.pattern, text)) == len(named.findall(re.sub("#.*", "", text)))
        for service in all_services(path).values():
            for volume in mounted(service).values():
                if volume["type"] == "bind":
                    assert volume["read_only"]
                    assert volume["bind"] == {"create_host_path": False}


def test_shared_memory_outlives_the_service_that_fills_it_and_any_user_may_write_to_it() -> None:
    """Joined to another container's, a worker could not start before that one runs, which a rebooted host need not do
    first; and one that is started anew would have a new one."""
    services = all_services()
    for name in ("weights", "prefill", "decode", "prefill-gpu", "decode-gpu"):
        assert not {"ipc", "shm_size"} & services[name].keys()
        at = mounted(services[name])["/dev/shm"]
        assert (at["type"], at["source"], at["volume"]) == ("volume", "shm", {"nocopy": True})
    options = yaml.safe_load(COMPOSE.read_text())["volumes"]["shm"]["driver_opts"]
    assert options["type"] == "tmpfs"
    assert "mode=1777" in options["o"]
    # the kernel knows no gb
    assert re.search(r"^WEFT_SHM_SIZE=\d+[kmg]$", (ROOT / ".env.example").read_text(), re.M)


def test_scheduler_and_workers_know_the_kvstore(services: dict[str, Any]) -> None:
    for name in ("scheduler", "prefill", "decode"):
        host, _, port = services[name]["environment"]["WEFT_KVSTORE_ADDR"].partition(":")
        assert services[host]["environment"]["WEFT_PORT"] == port


def test_weights_service_and_workers_have_one_draft_model() -> None:
    parsed = yaml.safe_load(COMPOSE.read_text())["services"]
    told = {name: each["environment"]["WEFT_DRAFT"] for name, each in parsed.items() if "WEFT_DRAFT" in str(each)}
    assert told == dict.fromkeys(("weights", "prefill", "decode", "prefill-gpu", "decode-gpu"), "${WEFT_DRAFT:-auto}")


def test_workers_do_not_wait_for_a_store_that_they_can_do_without(services: dict[str, Any]) -> None:
    for name in ("prefill", "decode"):
        assert services[name]["depends_on"]["kvstore"] == {"condition": "service_started"}


def test_only_what_reads_a_checkpoint_or_waits_for_who_does_may_take_long_to_be_well(services: dict[str, Any]) -> None:
    long = {name for name, service in services.items() if service["healthcheck"]["start_period"] == "900s"}
    assert long == {"weights", "prefill", "decode", "gateway"}


def test_hub_token_and_cache_reach_only_services_that_read_the_model(services: dict[str, Any]) -> None:
    readers = {"weights", "prefill", "decode", "gateway"}
    assert {name for name, service in services.items() if "HF_TOKEN" in service.get("environment", {})} == readers
    assert {name for name, service in services.items() if "/hub" in mounted(service)} == readers
    assert all(services[name]["environment"]["HF_HOME"] == "/hub" for name in readers)
    assert "-m 700 /hub " in (ROOT / "Dockerfile").read_text()


def test_the_store_has_a_disk_that_outlives_its_container_once_it_is_told_so(services: dict[str, Any]) -> None:
    (volume,) = services["kvstore"]["volumes"]
    source, target, _ = volume.split(":")
    assert source in yaml.safe_load(COMPOSE.read_text())["volumes"]
    assert services["kvstore"]["environment"]["WEFT_DISK_PATH"] == ""
    assert f"WEFT_DISK_PATH={target} " in (ROOT / ".env.example").read_text()
    assert f"-o weft -g weft -m 700 {target}\n" in (ROOT / "Dockerfile").read_text()
    # what compose gives is what the service reads
    settings = {name for name in services["kvstore"]["environment"] if name.startswith("WEFT_")}
    assert {variable_name(name) for name in KvStoreConfig.model_fields} <= settings


def test_each_image_is_built_by_one_service_and_pulled_by_none() -> None:
    """Two that build one tag at once get in each other's way; and no registry has it."""
    ours = {name: service for name, service in all_services().items() if is_weft(service)}
    builders: dict[str, list[str]] = {service["image"]: [] for service in ours.values()}
    for name, service in ours.items():
        assert service["pull_policy"] == "never"
        if "build" in service:
            builders[service["image"]].append(name)
    # gateway and workers need the one, and every command with GPUs names the other
    assert builders == {"weft:cpu": ["scheduler"], "weft:gpu": ["prefill-gpu"]}
    for name in ("gateway", "prefill", "decode", "prefill-gpu", "decode-gpu"):
        assert "scheduler" in ours[name]["depends_on"]
    pages = COMPOSE.read_text() + (ROOT / "docs/operate/containers.md").read_text()
    named = re.findall(r"up --build gateway (\S+ \S+)", pages)
    assert named
    assert all("prefill-gpu" in each for each in named)


def test_the_gpu_image_has_one_cuda_throughout() -> None:
    """PyPI's torch of this version is built for CUDA 13."""
    arguments = all_services()["prefill-gpu"]["build"]["args"]
    assert arguments == {"MOONCAKE": "cuda13", "WEFT_TORCH_INDEX": ""}
    assert "WEFT_TORCH_INDEX: ${WEFT_GPU_TORCH_INDEX:-}" in COMPOSE.read_text()
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    assert pins["torch"] == "2.13.0", "look which CUDA PyPI's build of the new one is for: Mooncake has to follow"


def test_gpu_workers_differ_from_the_others_in_image_device_and_name_only() -> None:
    parsed = yaml.safe_load(COMPOSE.read_text())["services"]
    for name in ("prefill", "decode"):
        cpu, gpu = parsed[name], parsed[f"{name}-gpu"]
        changed = {key for key in cpu if cpu[key] != gpu[key]} | (gpu.keys() - cpu.keys())
        assert changed - {"build"} == {"image", "profiles", "ulimits", "deploy", "environment"}
        own = {"WEFT_ADVERTISE_HOST": f"{name}-gpu", "WEFT_WORKER_ID": f"{name}-gpu-0", "WEFT_DEVICE": "cuda"}
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
