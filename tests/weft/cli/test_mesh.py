"""The plan of a local mesh: who starts after whom, on which ports, with which settings."""

from __future__ import annotations

import dataclasses
import functools
import signal
from pathlib import Path

import pytest

from weft.cli.child import ChildSpec
from weft.cli.layout import Addresses, MeshOptions, usable_gpus
from weft.cli.mesh import mesh_specs, with_memory
from weft.cli.up import ending_signals
from weft.config import read_config, read_models
from weft.errors import ConfigError
from weft.options import WeightFormat
from weft.worker.config import WorkerConfig
from weft_services.kvstore.config import KvStoreConfig

ONE = {"m": Path("/m")}
OPTIONS = MeshOptions(ONE)
AT = Addresses(
    valkey="127.0.0.1:1",
    scheduler="127.0.0.1:2",
    kvstore="127.0.0.1:3",
    weights="127.0.0.1:4",
    workers={"prefill-0": "127.0.0.1:5", "decode-0": "127.0.0.1:6", "decode-1": "127.0.0.1:7"},
    gateways={"gateway": 9},
)


def specs_of(options: MeshOptions = OPTIONS, at: Addresses = AT) -> dict[str, ChildSpec]:
    """The children by name."""
    return {spec.name: spec for spec in mesh_specs(options, at)}


def settings_of(spec: ChildSpec) -> dict[str, str]:
    return {name: value for name, value in spec.environ.items() if name.startswith("WEFT_")}


def test_workers_wait_for_what_they_call_and_end_before_it() -> None:
    specs = specs_of(MeshOptions(ONE, num_decode=2))
    assert list(specs) == ["valkey", "scheduler", "kvstore", "weights", *AT.workers, "gateway"]
    for spec in specs.values():
        assert all(specs[name].tier < spec.tier for name in spec.after)
    assert specs["decode-1"].command[1:] == ("-m", "weft_services.worker")
    assert specs["decode-1"].environ["WEFT_ROLE"] == "decode"
    assert specs["decode-1"].environ["WEFT_WORKER_ID"] == "decode-1"
    assert specs["decode-1"].environ["WEFT_PORT"] == "7"


def test_workers_know_their_layout() -> None:
    worker = read_config(WorkerConfig, specs_of(MeshOptions(ONE, tp=4, ep=2))["decode-0"].environ)
    assert (worker.layout.tp, worker.layout.ep, worker.layout.short) == (4, 2, "TP4 EP2")


def test_workers_for_both_roles_are_counted_and_told_so() -> None:
    options = MeshOptions(ONE, num_prefill=0, num_decode=0, num_both=2)
    assert (options.num_workers, list(options.workers)) == (2, ["worker-0", "worker-1"])
    at = dataclasses.replace(AT, workers={"worker-0": "127.0.0.1:5", "worker-1": "127.0.0.1:6"})
    specs = specs_of(options, at)
    assert [specs[name].environ["WEFT_ROLE"] for name in at.workers] == ["both", "both"]


def test_every_process_has_a_memory_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    options = MeshOptions(ONE, num_decode=2, num_gateways=2)
    specs = mesh_specs(options, dataclasses.replace(AT, gateways={"gateway-0": 9, "gateway-1": 10}))
    planned = {spec.name: spec.memory_bytes for spec in with_memory(specs, dict.fromkeys(options.workers, 7))}
    assert [planned[name] for name in options.workers] == [7, 7, 7]
    assert all(planned.values())
    monkeypatch.setenv("WEFT_STORE_MEMORY_BYTES", str(1 << 40))
    larger = {spec.name: spec.memory_bytes for spec in with_memory(specs, dict.fromkeys(options.workers, 7))}
    assert [name for name in planned if larger[name] > planned[name]] == ["kvstore"]


def test_peers_are_told_each_others_addresses() -> None:
    specs = specs_of()
    worker = specs["prefill-0"].environ
    assert worker["WEFT_SCHEDULER_ADDR"] == AT.scheduler
    assert worker["WEFT_WEIGHTS_ADDR"] == AT.weights
    assert worker["WEFT_KVSTORE_ADDR"] == AT.kvstore
    assert specs["scheduler"].environ["WEFT_KVSTORE_ADDR"] == AT.kvstore
    assert specs["scheduler"].environ["WEFT_REDIS_URL"] == "redis://127.0.0.1:1/0"


def test_the_store_is_told_of_its_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def told(options: MeshOptions) -> KvStoreConfig:
        specs = specs_of(options)
        return read_config(KvStoreConfig, specs["kvstore"].environ)

    options = MeshOptions(ONE, disk=tmp_path / "kv", disk_gib=3)
    assert (told(options).disk_path, told(options).disk_bytes) == (tmp_path / "kv", 3 << 30)
    assert told(MeshOptions(ONE)).disk_path is None
    monkeypatch.setenv("WEFT_DISK_PATH", str(tmp_path))
    assert told(MeshOptions(ONE)).disk_path == tmp_path, "the user's own variable"


def test_workers_are_told_how_weights_stay_in_memory() -> None:
    for weights in WeightFormat:
        worker = specs_of(MeshOptions(ONE, weight_format=weights))["decode-0"]
        assert read_config(WorkerConfig, settings_of(worker)).weight_format is weights


def test_workers_are_told_how_many_sequences_a_step_may_have() -> None:
    worker = specs_of(MeshOptions(ONE, max_seqs=12))["decode-0"]
    assert read_config(WorkerConfig, settings_of(worker)).max_seqs == 12


@pytest.mark.parametrize(
    ("gpus", "found"),
    [
        ((), [None, None, None]),
        (("0",), [("0", "0.3333")] * 3),
        (("0", "3"), [("0", "0.5000"), ("3", "1.0000"), ("0", "0.5000")]),
        (("GPU-a", "GPU-b", "GPU-c", "GPU-d"), [("GPU-a", "1.0000"), ("GPU-b", "1.0000"), ("GPU-c", "1.0000")]),
    ],
)
def test_gpus_are_assigned_round_robin_and_shared(
    gpus: tuple[str, ...], found: list[tuple[str, str] | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    specs = specs_of(MeshOptions(ONE, num_decode=2, gpus=gpus))
    for name, own in zip(AT.workers, found, strict=True):
        environ = specs[name].environ
        told = (environ["CUDA_VISIBLE_DEVICES"], environ["WEFT_GPU_SHARE"]) if "WEFT_GPU_SHARE" in environ else None
        assert told == own
    assert "CUDA_VISIBLE_DEVICES" not in specs["gateway"].environ


def test_gpus_that_the_user_chose_are_those_that_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.cli.layout.cards", lambda: [None] * 4)
    assert usable_gpus({}) == ("0", "1", "2", "3")
    assert usable_gpus({"CUDA_VISIBLE_DEVICES": "2, 3"}) == ("2", "3")
    assert usable_gpus({"CUDA_VISIBLE_DEVICES": ""}) == ()
    assert usable_gpus({"CUDA_VISIBLE_DEVICES": "-1"}) == ()
    assert usable_gpus({"CUDA_VISIBLE_DEVICES": "1,-1,2"}) == ("1",), "CUDA reads no further"


def test_each_model_has_workers_of_its_own_and_the_gateway_all() -> None:
    options = MeshOptions({"a": Path("/m/a"), "b": Path("/m/b")}, num_decode=2)
    assert options.num_workers == 6
    names = ["prefill-0", "prefill-1", "decode-0", "decode-1", "decode-2", "decode-3"]
    at = dataclasses.replace(AT, workers={name: f"127.0.0.1:{50 + port}" for port, name in enumerate(names)})
    specs = {spec.name: read_config_of(spec) for spec in mesh_specs(options, at) if spec.name != "valkey"}
    served = {name: list(specs[name]) for name in names}
    assert served == dict(zip(names, [["a"], ["b"], ["a"], ["a"], ["b"], ["b"]], strict=True))
    assert specs["gateway"] == specs["weights"] == options.models


def read_config_of(spec: ChildSpec) -> dict[str, Path]:
    """The models that a child is told of."""
    return read_models(spec.environ["WEFT_MODEL"], spec.environ["WEFT_MODEL_NAME"])


def test_a_guarded_gateway_is_asked_on_a_port_of_its_own() -> None:
    plain = mesh_specs(OPTIONS, AT)[-1]
    assert "WEFT_PRIVATE_PORT" not in plain.environ
    for options in (MeshOptions(ONE, keys="keys.json"), MeshOptions(ONE, has_tls=True)):
        gateway = mesh_specs(options, AT)[-1]
        assert (gateway.environ["WEFT_PRIVATE_PORT"], gateway.environ["WEFT_KEYS"]) == ("9", options.keys)


def test_private_port_of_a_single_gateway_is_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_PRIVATE_PORT", "8001")
    for options in (MeshOptions(ONE), MeshOptions(ONE, keys="keys.json")):
        assert mesh_specs(options, AT)[-1].environ["WEFT_PRIVATE_PORT"] == "8001"
    options = MeshOptions(ONE, num_gateways=2)
    at = dataclasses.replace(AT, gateways=dict(zip(options.gateways, (9, 10), strict=True)))
    assert [spec.environ["WEFT_PRIVATE_PORT"] for spec in mesh_specs(options, at)[-2:]] == ["9", "10"]


def test_private_port_0_is_chosen_and_a_wrong_one_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WEFT_PRIVATE_PORT", "0")  # any that is free, and this one is known to be
    assert mesh_specs(OPTIONS, AT)[-1].environ["WEFT_PRIVATE_PORT"] == "9"
    for wrong in ("soon", "70000"):
        monkeypatch.setenv("WEFT_PRIVATE_PORT", wrong)
        with pytest.raises(ConfigError, match="WEFT_PRIVATE_PORT"):
            mesh_specs(OPTIONS, AT)


def test_gateways_share_public_ports_not_private_ones() -> None:
    options = MeshOptions(ONE, num_gateways=2)
    at = dataclasses.replace(AT, gateways=dict(zip(options.gateways, (9, 10), strict=True)))
    gateways = mesh_specs(options, at)[-2:]
    assert [spec.name for spec in gateways] == ["gateway-0", "gateway-1"]
    assert [spec.environ["WEFT_PRIVATE_PORT"] for spec in gateways] == ["9", "10"]
    assert {(spec.environ["WEFT_HTTP_PORT"], spec.environ["WEFT_REUSE_PORT"]) for spec in gateways} == {("8000", "1")}
    assert "WEFT_REUSE_PORT" not in mesh_specs(OPTIONS, AT)[-1].environ


def test_user_settings_reach_services_except_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_CHUNK_TOKENS", "64")
    monkeypatch.setenv("WEFT_PORT", "1234")
    spec = next(spec for spec in mesh_specs(OPTIONS, AT) if spec.name == "prefill-0")
    assert spec.environ["WEFT_CHUNK_TOKENS"] == "64"
    assert spec.environ["WEFT_PORT"] == "5"


def test_grpc_keeps_its_own_log_to_errors_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GRPC_VERBOSITY", raising=False)
    services = [spec for spec in mesh_specs(OPTIONS, AT) if spec.name != "valkey"]
    assert {spec.environ["GRPC_VERBOSITY"] for spec in services} == {"ERROR"}
    monkeypatch.setenv("GRPC_VERBOSITY", "DEBUG")
    assert mesh_specs(OPTIONS, AT)[1].environ["GRPC_VERBOSITY"] == "DEBUG"


def test_worker_threads_spin_unless_the_user_sets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    for name in names:
        monkeypatch.delenv(name, raising=False)

    def found() -> set[tuple[str | None, ...]]:
        specs = [spec for spec in mesh_specs(OPTIONS, AT) if spec.name in AT.workers]
        assert specs
        return {tuple(spec.environ.get(name) for name in names) for spec in specs}

    assert found() == {("5000", None)}
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    assert found() == {(None, "passive")}
    monkeypatch.setenv("GOMP_SPINCOUNT", "0")
    assert found() == {("0", "passive")}


def test_another_nodes_weights_may_be_named_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_WEIGHTS_FROM", "there:1")
    for flag, asked in (("", "there:1"), ("here:2", "here:2")):
        specs = specs_of(MeshOptions(ONE, weights_from=flag))
        assert specs["weights"].environ["WEFT_WEIGHTS_FROM"] == asked


def test_weights_are_lent_at_an_address_of_ipv6_too() -> None:
    specs = specs_of(MeshOptions(ONE, weights_listen="[::1]:4"))
    assert specs["weights"].environ["WEFT_HOST"] == "::1"


def test_restarted_gateway_is_probed_for_health_only() -> None:
    gateway = mesh_specs(OPTIONS, AT)[-1]
    assert isinstance(gateway.probe_again, functools.partial)
    assert gateway.probe_again.args == ("http://127.0.0.1:8000/health",)


def test_a_mesh_under_nohup_outlives_the_terminal() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # these tests themselves may run under nohup
    try:
        assert signal.SIGHUP in ending_signals()
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        assert ending_signals() == [signal.SIGINT, signal.SIGTERM]
    finally:
        signal.signal(signal.SIGHUP, before)


def test_without_mooncake_there_is_no_store() -> None:
    specs = specs_of(MeshOptions(ONE, has_store=False))
    assert "kvstore" not in specs
    assert specs["prefill-0"].after == ("scheduler",)
    assert specs["prefill-0"].environ["WEFT_KVSTORE_ADDR"] == ""
    assert specs["scheduler"].environ["WEFT_KVSTORE_ADDR"] == ""
