"""Settings of all services: models by name, numbers and ports that cannot be, levels of the log."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from weft.config import Address, Count, Port, Settings, model_name, read_config, read_models
from weft.errors import ConfigError
from weft.options import CpuKernels
from weft.worker.config import WorkerConfig
from weft_kernels.native.build import FLAGS
from weft_services.weights.config import WeightsConfig as WeightsConfig


@pytest.mark.parametrize(
    ("text", "name", "expected"),
    [
        ("/m/nano", "", {"nano": "/m/nano"}),
        ("/m/nano/", "small", {"small": "/m/nano"}),
        ("/m/a=1,b", "odd", {"odd": "/m/a=1,b"}),
        ("small=/m/a, big=/m/b=2", "", {"small": "/m/a", "big": "/m/b=2"}),
        ("org/model=/m/a", "", {"org/model": "/m/a"}),
    ],
)
def test_models_are_read_by_name(text: str, name: str, expected: dict[str, str]) -> None:
    assert read_models(text, name) == {served: Path(path) for served, path in expected.items()}


def test_a_directory_may_have_a_sign_of_equality_in_its_path(tmp_path: Path) -> None:
    """As tools that keep runs apart name them."""
    (model := tmp_path / "run=3" / "model").mkdir(parents=True)
    assert read_models(str(model)) == {"model": model}
    assert read_models(f"mine={model}") == {"mine": model}


def test_a_list_may_be_longer_than_a_path() -> None:
    places = {f"model-{number}": Path("/models") / f"snapshot-{number}" for number in range(300)}
    assert read_models(",".join(f"{served}={path}" for served, path in places.items())) == places


@pytest.mark.parametrize("text", ["a=/m/a,/m/b", "a=/m/a,a=/m/b", "=/m/a", "a=", "a=/m/a,"])
def test_lists_that_name_no_model_are_refused_with_the_variable(text: str) -> None:
    with pytest.raises(ConfigError, match="WEFT_MODEL"):
        read_models(text)


class Patience(Settings):
    """Settings of a service."""

    wait_seconds: float = 1.0


@pytest.mark.parametrize("raw", ["nan", "inf", "-inf", "soon"])
def test_a_number_of_no_size_is_refused_by_the_name_of_its_variable(raw: str) -> None:
    """A service would compare with it, and find all well."""
    with pytest.raises(ConfigError, match=f"WEFT_WAIT_SECONDS='{raw}'"):
        read_config(Patience, {"WEFT_WAIT_SECONDS": raw})
    assert read_config(Patience, {"WEFT_WAIT_SECONDS": "2.5"}) == Patience(wait_seconds=2.5)


class Place(Settings):
    """Where a service listens."""

    port: Port = 0
    private_port: Port | None = None


@pytest.mark.parametrize("name", ["WEFT_PORT", "WEFT_PRIVATE_PORT"])
@pytest.mark.parametrize("raw", ["-1", "65536", "70000"])
def test_a_port_that_there_is_not_is_refused_by_the_name_of_its_variable(name: str, raw: str) -> None:
    """gRPC would listen on another one, and say nothing."""
    with pytest.raises(ConfigError, match=f"{name}='{raw}'"):
        read_config(Place, {name: raw})
    assert read_config(Place, {"WEFT_PORT": "65535"}) == Place(port=65535)


class Peers(Settings):
    """Who is called, and how much there is of something."""

    scheduler_addr: Address = ""
    weights_from: Address = ""
    num_blocks: Count = 0


@pytest.mark.parametrize("name", ["WEFT_SCHEDULER_ADDR", "WEFT_WEIGHTS_FROM"])
@pytest.mark.parametrize("port", ["0", "65536", "84313", "9" * 30])
def test_an_address_with_a_port_that_there_is_not_is_refused(name: str, port: str) -> None:
    """gRPC would call the lower half of it, 18777 for 84313, and a command steer the mesh that listens there."""
    with pytest.raises(ConfigError, match=f"{name}='two:{port}': expected a port of 1 to 65535"):
        read_config(Peers, {name: f"one:18777, two:{port}"})
    for good in ("one:1,two:65535", "[::1]:80", "one", "::1"):
        assert read_config(Peers, {"WEFT_SCHEDULER_ADDR": good}) == Peers(scheduler_addr=good)


def test_a_number_that_no_message_between_services_holds_is_refused() -> None:
    assert read_config(Peers, {"WEFT_NUM_BLOCKS": str(2**63 - 1)}) == Peers(num_blocks=2**63 - 1)
    for wrong in (2**63, -1):
        with pytest.raises(ConfigError, match=f"WEFT_NUM_BLOCKS='{wrong}': expected"):
            read_config(Peers, {"WEFT_NUM_BLOCKS": str(wrong)})


@pytest.mark.parametrize("config", [WorkerConfig, WeightsConfig])
def test_more_threads_than_a_process_may_have_are_refused_before_any_is_started(config: type) -> None:
    needed = {f"WEFT_{name}": "x" for name in ("MODEL", "MODEL_NAME", "WORKER_ID", "SCHEDULER_ADDR", "WEIGHTS_ADDR")}
    with pytest.raises(ConfigError, match="WEFT_THREADS='100000': expected less than or equal to 1024"):
        read_config(config, {**needed, "WEFT_THREADS": "100000"})


@pytest.mark.parametrize(("level", "status"), [("loud", 2), ("debug", 0), ("", 0)])
def test_a_level_that_the_log_has_not_ends_a_service_with_status_2_and_one_line(level: str, status: int) -> None:
    """It is read before all else, to tell of what is wrong with the rest."""
    start = [sys.executable, "-c", "from weft import log; log.setup('decode')"]
    environ = {**os.environ, "WEFT_LOG_LEVEL": level}
    ended = subprocess.run(start, env=environ, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == status
    assert [("WEFT_LOG_LEVEL='LOUD'" in line) for line in ended.stderr.splitlines()] == [True] * bool(status)


@pytest.mark.parametrize("config", [WorkerConfig, WeightsConfig])
def test_kernels_that_there_are_not_are_refused_before_a_model_is_loaded(config: type) -> None:
    needed = {f"WEFT_{name}": "x" for name in ("MODEL", "MODEL_NAME", "WORKER_ID", "SCHEDULER_ADDR", "WEIGHTS_ADDR")}
    with pytest.raises(ConfigError, match="WEFT_CPU_KERNELS='sse': expected 'amx', "):
        read_config(config, {**needed, "WEFT_CPU_KERNELS": "sse"})
    for isa in (*FLAGS, "torch"):
        assert read_config(config, {**needed, "WEFT_CPU_KERNELS": isa}).cpu_kernels == isa
    assert len(CpuKernels) == len(FLAGS) + 1


class Store(Settings):
    """Where it lies."""

    redis_url: str = ""


@pytest.mark.parametrize("password", ["secret", "sec@ret", "secret@", "sec/ret"])
def test_the_log_has_no_password_whatever_it_is_made_of(password: str) -> None:
    """Clients take what stands before the last @ for it."""
    told = str(Store(redis_url=f"redis://me:{password}@valkey:6379/0"))
    assert told == "redis_url=redis://***@valkey:6379/0"


@pytest.mark.parametrize("query", ["password=secret", "db=1&password=sec@ret&username=me"])
def test_the_log_has_no_password_from_behind_an_address(query: str) -> None:
    """Where clients of a Valkey look for one too."""
    told = str(Store(redis_url=f"redis://valkey:6379/0?{query}"))
    assert told.startswith("redis_url=redis://valkey:6379/0?")
    assert "password=***" in told
    assert "ret" not in told


HUB = "models--org--name/snapshots/0a1b2c"


@pytest.mark.parametrize(
    ("directory", "expected"),
    [
        (HUB, "name"),
        (HUB + "/", "name"),
        (HUB + "/../0a1b2c/.", "name"),
        ("models--gpt2/snapshots/0a1b2c", "gpt2"),
        ("models--org--name-2.5_x/snapshots/main", "name-2.5_x"),
        ("link", "name"),
        ("plain", "plain"),
        ("other/snapshots/0a1b2c", "0a1b2c"),
        ("models--org--name", "models--org--name"),
    ],
)
def test_model_name_is_that_of_the_hubs_repository(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, directory: str, expected: str
) -> None:
    (tmp_path / HUB).mkdir(parents=True)
    (tmp_path / "link").symlink_to(HUB)
    assert model_name(tmp_path / directory) == expected
    monkeypatch.chdir(tmp_path)
    assert list(read_models(directory)) == [expected]


def test_model_name_of_the_current_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / HUB).mkdir(parents=True)
    monkeypatch.chdir(tmp_path / HUB)
    assert model_name(Path(".")) == "name"
