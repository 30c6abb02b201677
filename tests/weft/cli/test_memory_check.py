"""`weft up` refuses what does not memory_check, before it starts anything, in one line that says what to do."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from weft.capacity.layout import GIB
from weft.capacity.sizes import RequestedSizes, choose_sizes
from weft.cli import memory_check
from weft.cli.gpus import Card
from weft.cli.layout import MeshOptions
from weft.cli.main import app
from weft.cli.memory_check import check_memory, held_bytes
from weft.errors import BadCheckpoint, ConfigError
from weft.model.config import read_config
from weft.weights.checkpoint import read_checkpoint

SHIPPED = Path(__file__).parents[3] / "models" / "weft-nano"
OPTIONS = MeshOptions({"nano": SHIPPED})
MIB = 1 << 20


@pytest.fixture(autouse=True)
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with room, and nobody else's weights in it."""
    set_memory(monkeypatch, 64 * GIB)
    set_shared(monkeypatch, 64 * GIB)
    monkeypatch.setattr(memory_check, "held_bytes", lambda: 0)


def set_memory(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(memory_check, "available_bytes", lambda: size)


def set_shared(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(memory_check, "shared_memory", lambda: (size, size))


def needed_bytes(options: MeshOptions, num_blocks: int = 0) -> int:
    """Added up by hand: the image once, and what each worker takes of its own."""
    config, sizes = read_config(SHIPPED), choose_sizes(RequestedSizes(num_blocks=num_blocks), False)
    room = sizes.memory_budget(config, 64 * GIB)
    own = room.weights + room.activations + sizes.min_pool(config)[0]
    return len(options.models) * read_checkpoint(SHIPPED).total_bytes + options.num_workers * own


@pytest.mark.parametrize(
    "options",
    [
        OPTIONS,
        replace(OPTIONS, num_decode=3),
        replace(OPTIONS, num_prefill=0, num_decode=0, num_both=1),
        replace(OPTIONS, models={"a": SHIPPED, "b": SHIPPED}),
    ],
)
@pytest.mark.parametrize("num_blocks", [0, 900])
def test_all_workers_and_the_weights_in_shared_memory_must_fit(
    options: MeshOptions, num_blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed, environ = needed_bytes(options, num_blocks), {"WEFT_NUM_BLOCKS": str(num_blocks)}
    set_memory(monkeypatch, needed)
    check_memory(options, environ)
    set_memory(monkeypatch, needed - 1)
    with pytest.raises(BadCheckpoint, match=rf"take {needed / GIB:.2f} GiB, .*--both 1"):
        check_memory(options, environ)


def test_each_worker_has_a_plan_of_what_it_takes() -> None:
    options = replace(OPTIONS, num_decode=2)
    planned = check_memory(options, {})
    assert set(planned) == set(options.workers)
    config, sizes = read_config(SHIPPED), choose_sizes(RequestedSizes(), False)
    room = sizes.memory_budget(config, 64 * GIB)
    assert planned["decode-1"] == room.weights + room.activations + memory_check.WORKER_BYTES


def test_weights_that_lie_in_shared_memory_already_are_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    image = read_checkpoint(SHIPPED).total_bytes
    set_memory(monkeypatch, needed_bytes(OPTIONS) - image)
    set_shared(monkeypatch, 0)
    monkeypatch.setattr(memory_check, "held_bytes", lambda: image)
    check_memory(OPTIONS, {})


def test_shared_memory_that_is_too_small_is_told_with_the_command_that_mends_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_shared(monkeypatch, MIB)
    with pytest.raises(BadCheckpoint, match=r"mount -o remount,size=1G /dev/shm"):
        check_memory(OPTIONS, {})
    with pytest.raises(BadCheckpoint, match="remount"):
        check_memory(replace(OPTIONS, models={"a": SHIPPED, "b": SHIPPED}), {"WEFT_WEIGHTS_SHM_BYTES": str(2 * MIB)})
    set_shared(monkeypatch, 2 * MIB)
    check_memory(replace(OPTIONS, models={"a": SHIPPED, "b": SHIPPED}), {"WEFT_WEIGHTS_SHM_BYTES": str(2 * MIB)})


def test_what_files_hold_counts_and_not_what_their_config_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Matrices in float32 stay so on a CPU, those in bfloat16 take half of that."""
    shutil.copytree(SHIPPED, tmp_path / "wide")
    wide = {name: each.float() for name, each in load_file(SHIPPED / "model.safetensors").items()}
    save_file(wide, tmp_path / "wide" / "model.safetensors")
    config, (stored, image_bytes) = read_config(SHIPPED), memory_check._read(tmp_path / "wide")
    assert (config.dtype, stored) == ("bfloat16", replace(config, dtype="float32"))
    assert memory_check._read(SHIPPED) == (config, image_bytes // 2)
    sizes = choose_sizes(RequestedSizes(), False)
    own = sizes.memory_budget(stored, 64 * GIB).weights - sizes.memory_budget(config, 64 * GIB).weights
    assert own > MIB
    needed = needed_bytes(OPTIONS) + image_bytes // 2 + OPTIONS.num_workers * own
    options = replace(OPTIONS, models={"nano": tmp_path / "wide"})
    set_memory(monkeypatch, needed)
    check_memory(options, {})
    set_memory(monkeypatch, needed - 1)
    with pytest.raises(BadCheckpoint, match="no room for nano"):
        check_memory(options, {})


def test_each_worker_must_fit_on_the_card_that_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_check, "is_for_cpus_only", lambda: False)
    there = [Card("H100", 80 * GIB, 79 * GIB, "570"), Card("GTX", 2 * GIB, GIB, "570")]
    monkeypatch.setattr(memory_check, "cards", lambda: there)
    check_memory(replace(OPTIONS, gpus=("0",)), {})
    with pytest.raises(BadCheckpoint, match=r"nano: decode-0 on GTX: the model does not fit: .* for KV of 1024"):
        check_memory(replace(OPTIONS, gpus=("0", "1")), {})
    with pytest.raises(BadCheckpoint, match=r"prefill-0 on H100: .*WEFT_NUM_BLOCKS"):
        check_memory(replace(OPTIONS, gpus=("0",)), {"WEFT_NUM_BLOCKS": "1000000"})


def test_gpus_whose_memory_nobody_tells_are_left_to_their_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_check, "is_for_cpus_only", lambda: False)
    told = subprocess.CompletedProcess([], 0, "GB10, [N/A], [N/A], 580.1\n", "")
    monkeypatch.setattr("weft.cli.gpus.subprocess.run", lambda *args, **kwargs: told)
    check_memory(replace(OPTIONS, gpus=("0",)), {})


def test_a_setting_that_cannot_be_is_named() -> None:
    with pytest.raises(ConfigError, match="WEFT_CHUNK_TOKENS='-1'"):
        check_memory(OPTIONS, {"WEFT_CHUNK_TOKENS": "-1"})
    with pytest.raises(ConfigError, match="WEFT_WEIGHTS_SHM_BYTES='lots'"):
        check_memory(OPTIONS, {"WEFT_WEIGHTS_SHM_BYTES": "lots"})


def test_up_says_it_in_one_line_and_starts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.cli.up.mooncake_trouble", lambda: "")
    monkeypatch.setattr("weft.cli.up.usable_gpus", lambda environ: ())
    set_memory(monkeypatch, MIB)
    ports = []
    for _ in range(2):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            ports.append(str(probe.getsockname()[1]))
    result = CliRunner().invoke(app, ["up", "--model", str(SHIPPED), "--port", ports[0], "--grpc-port", ports[1]])
    assert result.exit_code == 2
    assert "no room for weft-nano: 2 workers" in result.stderr
    assert result.stderr.count("\n") == 1
    assert "kvstore" not in result.output, "nothing had been started"


def test_only_images_of_our_own_are_used_again_or_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_check, "SHARED_MEMORY", tmp_path)
    (tmp_path / "weft-weights-1").write_bytes(bytes(8192))
    assert held_bytes() == 8192
    monkeypatch.setattr(os, "geteuid", lambda: 54321)
    assert held_bytes() == 0
