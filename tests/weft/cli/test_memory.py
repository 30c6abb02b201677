"""Memory of a mesh: `weft up` refuses in one line what does not fit, and ends a child far beyond its plan."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from tests.weft.cli.test_supervisor import QUICK, Recorder, running, spec
from typer.testing import CliRunner

from weft.capacity.draft import draft_size
from weft.capacity.layout import GIB
from weft.capacity.sizes import RequestedSizes, choose_sizes
from weft.cli import memory
from weft.cli.layout import Card, MeshOptions
from weft.cli.main import app
from weft.cli.memory import MIB, MemoryGuard, anonymous_bytes, check_memory, held_bytes, least_left_bytes
from weft.cli.supervisor import Supervisor
from weft.errors import BadCheckpoint, ConfigError
from weft.model.config import read_config
from weft.model.draft_layers import with_draft
from weft.weights.checkpoint import read_checkpoint
from weft.weights.draft_checkpoint import read_draft

SHIPPED = Path(__file__).parents[3] / "models" / "weft-nano"
OPTIONS = MeshOptions({"nano": SHIPPED}, draft="none")


@pytest.fixture(autouse=True)
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with room, and nobody else's weights in it."""
    set_memory(monkeypatch, 64 * GIB)
    set_shared(monkeypatch, 64 * GIB)
    monkeypatch.setattr(memory, "held_bytes", lambda: 0)


def set_memory(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda: size)


def set_shared(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(memory, "shared_memory", lambda: (size, size))


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


def test_a_draft_head_counts_with_its_kv_and_features(monkeypatch: pytest.MonkeyPatch) -> None:
    options, source = replace(OPTIONS, draft="auto"), read_draft("auto", SHIPPED)
    assert source is not None
    head, plain = draft_size(source.config, "float32", is_cpu=True), read_config(SHIPPED)
    sizes = choose_sizes(RequestedSizes(), False)
    pool = sizes.min_pool(with_draft(plain, head.layer))[0] - sizes.min_pool(plain)[0]
    rows = 33 * sizes.max_seqs + sizes.burst_tokens + max(64, sizes.max_seqs) + sizes.max_seqs
    own = head.weight_bytes + rows * 3 * 256 * 4 + pool
    assert 2_100_000 < head.weight_bytes < 2_200_000
    assert pool == sizes.min_pool(plain)[0] // 6
    needed = needed_bytes(OPTIONS) + source.checkpoint.total_bytes + options.num_workers * own
    set_memory(monkeypatch, needed)
    planned = check_memory(options, {})
    assert planned["decode-0"] - check_memory(OPTIONS, {})["decode-0"] == own - pool
    set_memory(monkeypatch, needed - 1)
    with pytest.raises(BadCheckpoint, match="no room for nano"):
        check_memory(options, {})


def test_each_worker_has_a_plan_of_what_it_takes() -> None:
    options = replace(OPTIONS, num_decode=2)
    planned = check_memory(options, {})
    assert set(planned) == set(options.workers)
    config, sizes = read_config(SHIPPED), choose_sizes(RequestedSizes(), False)
    room = sizes.memory_budget(config, 64 * GIB)
    assert planned["decode-1"] == room.weights + room.activations + memory.WORKER_BYTES


def test_weights_in_shared_memory_are_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    image = read_checkpoint(SHIPPED).total_bytes
    set_memory(monkeypatch, needed_bytes(OPTIONS) - image)
    set_shared(monkeypatch, 0)
    monkeypatch.setattr(memory, "held_bytes", lambda: image)
    check_memory(OPTIONS, {})


def test_small_shared_memory_is_refused_with_remount_command(
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
    config, (stored, image_bytes) = read_config(SHIPPED), memory._read(tmp_path / "wide")
    assert (config.dtype, stored) == ("bfloat16", replace(config, dtype="float32"))
    assert memory._read(SHIPPED) == (config, image_bytes // 2)
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
    monkeypatch.setattr(memory, "is_for_cpus_only", lambda: False)
    there = [Card("H100", 80 * GIB, 79 * GIB, "570"), Card("GTX", 2 * GIB, GIB, "570")]
    monkeypatch.setattr(memory, "cards", lambda: there)
    check_memory(replace(OPTIONS, gpus=("0",)), {})
    with pytest.raises(BadCheckpoint, match=r"nano: decode-0 on GTX: the model does not fit: .* for KV of 1024"):
        check_memory(replace(OPTIONS, gpus=("0", "1")), {})
    with pytest.raises(BadCheckpoint, match=r"prefill-0 on H100: .*WEFT_NUM_BLOCKS"):
        check_memory(replace(OPTIONS, gpus=("0",)), {"WEFT_NUM_BLOCKS": "1000000"})


def test_gpus_without_memory_figures_are_not_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "is_for_cpus_only", lambda: False)
    told = subprocess.CompletedProcess([], 0, "GB10, [N/A], [N/A], 580.1\n", "")
    monkeypatch.setattr("weft.cli.layout.subprocess.run", lambda *args, **kwargs: told)
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
    monkeypatch.setattr(memory, "SHARED_MEMORY", tmp_path)
    (tmp_path / "weft-weights-1").write_bytes(bytes(8192))
    assert held_bytes() == 8192
    monkeypatch.setattr(os, "geteuid", lambda: 54321)
    assert held_bytes() == 0


# it grows without end, by what one page in each chunk takes, and reaches the bound within a few steps
GREEDY = """
import time
print('up', flush=True)
held = []
while True:
    held.append(bytearray(b'x') * (8 << 20))
    time.sleep(0.02)
"""
SHARING = """
import mmap, time
held = mmap.mmap(-1, 256 << 20)
for start in range(0, len(held), 1 << 20):
    held[start : start + (1 << 20)] = bytes(1 << 20)
print('up', flush=True)
time.sleep(600)
"""
MODEST = "import time; held = bytearray(b'x') * (32 << 20); print('up', flush=True); time.sleep(600)"


class Machine:
    """What a guard measures."""

    def __init__(self, planned: int) -> None:
        self.used, self.left = 0, 64 * GIB
        self.lines: list[str] = []
        self.guard = MemoryGuard(planned, self.lines.append, lambda pid: self.used, lambda: self.left)

    def look(self, used: int) -> str:
        self.used = used
        self.guard.look(7)
        return self.guard.verdict


@pytest.mark.parametrize("planned", [GIB, 100 * GIB], ids=["small", "large"])
def test_guard_ends_what_is_far_beyond_its_plan(planned: int) -> None:
    machine = Machine(planned)
    assert not machine.look(planned)
    assert not machine.lines
    assert not machine.look(planned * 2)
    assert "memory beyond plan used_mib=" in machine.lines[-1]
    assert machine.look(planned * 3 + 5 * GIB)
    assert machine.lines[-1].startswith("memory far beyond plan, process is ended used_mib=")


def test_guard_ends_less_when_the_machine_runs_out() -> None:
    machine = Machine(10 * GIB)
    machine.left = least_left_bytes() - 1
    assert not machine.look(10 * GIB), "what was planned may be taken to the last byte"
    assert machine.look(14 * GIB)


def test_guard_logs_each_growth_once() -> None:
    machine = Machine(GIB)
    for used in (2, 2, 1, 2, 2):
        machine.look(used * GIB)
    assert len(machine.lines) == 2


async def test_guard_without_a_plan_returns() -> None:
    await asyncio.wait_for(MemoryGuard(0, print).watch(None), 5)  # type: ignore[arg-type]


@contextmanager
def started(program: str) -> Iterator[int]:
    """The number of a process that has said "up" and leads a group."""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            yield process.pid
        finally:
            os.killpg(process.pid, signal.SIGKILL)


def test_memory_counts_descendants_and_no_shared_memory() -> None:
    family = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {MODEST!r}]).wait()"
    with started(family) as parent, started(SHARING) as sharing:
        assert anonymous_bytes(parent) > 32 * MIB
        assert anonymous_bytes(sharing) < 128 * MIB


def test_memory_of_a_process_that_ended_is_nothing() -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    assert anonymous_bytes(ended.pid) == 0


async def test_supervisor_starts_greedy_child_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "HARD_EXTRA_BYTES", 64 * MIB)
    monkeypatch.setattr(memory, "PERIOD_SECONDS", 0.05)
    recorder = Recorder()
    specs = [
        spec(recorder, "greedy", GREEDY, memory_bytes=32 * MIB),
        spec(recorder, "modest", MODEST, memory_bytes=64 * MIB),
    ]
    async with running(Supervisor(specs, recorder, QUICK)):
        await recorder.until(lambda: len(recorder.deaths) > 1)
    assert {name for name, *_ in recorder.deaths} == {"greedy"}
    assert recorder.deaths[0][1].startswith("memory: ")
    assert any("memory beyond plan" in line for name, line in recorder.lines if name == "greedy")
