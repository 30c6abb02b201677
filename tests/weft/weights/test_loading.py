"""Reading past the page cache, the plan of a load, and what it takes of memory."""

from __future__ import annotations

import errno
import json
import mmap
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from loadtest.weights.loader import PeakMemory

from tests.weft.weights.checkpoints import make_checkpoint, safetensors_bytes, write_config
from weft.errors import BadCheckpoint, StorageUnavailable
from weft.weights import formats
from weft.weights import image as image_module
from weft.weights import load as load_module
from weft.weights.checkpoint import INDEX_FILE, TensorSource, read_checkpoint, source_id
from weft.weights.formats import ReadBuffers, TensorEntry
from weft.weights.image import write_image
from weft.weights.load import files_reader, image_layout
from weft.weights.safetensors import header_bytes
from weft.weights.storage import Blob, FileBlob, LocalOrigin, Scratch, WeightsFile
from weft_bundle import map_ahead as ahead_module
from weft_bundle.map_ahead import ParallelFileBlob
from weft_services.weights.service import MAX_PARTS


@pytest.mark.parametrize("size", [1, 511, 4096, 100_000])
def test_any_part_of_a_file_is_read_past_the_cache_and_through_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr(ahead_module, "PARALLEL_READ_BYTES", 1000)
    content = os.urandom(size)
    path = tmp_path / "file"
    path.write_bytes(content)
    scratch, threads = Scratch(), ThreadPoolExecutor(3)
    blobs: list[Blob] = [FileBlob(path), FileBlob(path, direct=False), ParallelFileBlob(path, threads)]
    for blob in blobs:
        with closing(blob):
            for begin in {0, 1, size // 2, min(4095, size - 1), size - 1}:
                for end in {begin, begin + 1, size // 2 + 1, size}:
                    if begin <= end <= size:
                        assert bytes(blob.read(begin, end - begin, scratch)) == content[begin:end]
            with pytest.raises(BadCheckpoint, match=f"truncated: it ends before byte {size + 1}"):
                blob.read(0, size + 1, scratch)


def test_a_kernel_without_large_pages_gives_small_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Small(mmap.mmap):
        def madvise(self, *advice: int) -> None:
            raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(mmap, "mmap", Small)
    make_checkpoint(tmp_path / "model")
    assert read_checkpoint(tmp_path / "model").tensors


@pytest.mark.parametrize("num_shards", [0, 3])
@pytest.mark.parametrize("piece_bytes", [100, 1000, 1 << 20])
def test_the_plan_reads_every_byte_once_and_neighbours_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_shards: int, piece_bytes: int
) -> None:
    for module in (formats, load_module):
        monkeypatch.setattr(module, "PIECE_BYTES", piece_bytes)
    make_checkpoint(tmp_path / "model", num_shards)
    planned = image_layout(read_checkpoint(tmp_path / "model"))
    runs = list(planned.runs())
    place = planned.data_start
    for run in runs:
        assert run.place == place
        assert run.size <= piece_bytes
        place += run.size
        starts = [run.pieces[0].offset + sum(part.size for part in run.pieces[:n]) for n in range(len(run.pieces))]
        assert [part.offset for part in run.pieces] == starts
    assert place == planned.size_bytes
    if piece_bytes == 1 << 20:
        assert len(runs) <= 2 * max(1, num_shards)  # two sizes of elements


def test_very_many_small_tensors_are_read_in_runs_that_another_node_takes(tmp_path: Path) -> None:
    file, num_tensors = WeightsFile(LocalOrigin(tmp_path), "model.safetensors"), 2 * load_module.MAX_RUN_PIECES + 1
    entries = [TensorEntry(f"scale.{number}", "F32", (4,), 16 * number, 16) for number in range(num_tensors)]
    runs = list(
        load_module.ImageLayout(tuple(TensorSource(file, entry) for entry in entries), 0, 16 * num_tensors).runs()
    )
    assert [len(run.pieces) for run in runs] == [load_module.MAX_RUN_PIECES, load_module.MAX_RUN_PIECES, 1]
    assert [run.place for run in runs] == [0, 16 * load_module.MAX_RUN_PIECES, 32 * load_module.MAX_RUN_PIECES]
    assert load_module.MAX_RUN_PIECES <= MAX_PARTS >= load_module.MAX_SAMPLES


def test_runs_are_the_bytes_of_their_tensors(tmp_path: Path) -> None:
    tensors = make_checkpoint(tmp_path / "model", 2)
    planned = image_layout(read_checkpoint(tmp_path / "model"))
    memory = ReadBuffers()
    with files_reader(planned) as read:
        for run in planned.runs():
            expected = b"".join(tensors[part.entry.name][2][part.first : part.first + part.size] for part in run.pieces)
            assert bytes(read(run, memory)) == expected


@pytest.mark.parametrize("num_failures", [0, 2, 1000])
def test_a_disk_that_fails_for_a_moment_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_failures: int
) -> None:
    """And one that goes on failing says nothing against the checkpoint."""
    make_checkpoint(tmp_path / "model")
    checkpoint = read_checkpoint(tmp_path / "model")
    asked = 0

    def preadv(fd: int, buffers: list[memoryview], offset: int) -> int:
        nonlocal asked
        asked += 1
        if asked <= num_failures:
            raise OSError(errno.EIO, "Input/output error")
        return real(fd, buffers, offset)

    real = os.preadv
    monkeypatch.setattr(os, "preadv", preadv)
    monkeypatch.setattr(load_module, "PAUSES_SECONDS", (0.0, 0.0))
    if num_failures > 2:
        with pytest.raises(
            StorageUnavailable, match=r"model\.safetensors: not readable at byte \d+: Input/output error"
        ):
            write_image(checkpoint, lambda *_: None, 1)
        assert not list(image_module.SHARED_MEMORY.glob(f"weft-weights-{checkpoint.directory_id}-*"))
    else:
        write_image(checkpoint, lambda *_: None, 1).release()


def test_two_loaders_at_once_end_up_with_one_image(tmp_path: Path) -> None:
    """Of two processes: one publishes, the other finds that it was second; nothing else stays."""
    make_checkpoint(tmp_path / "model")
    checkpoint = read_checkpoint(tmp_path / "model")
    program = (
        "import sys; from pathlib import Path; from weft.weights.checkpoint import read_checkpoint;"
        "from weft.weights.image import write_image; checkpoint = read_checkpoint(Path(sys.argv[1]));"
        "print('read', flush=True); sys.stdin.readline();"
        "image = write_image(checkpoint, lambda *_: None, 2); print(image.weights_hash, flush=True);"
        "sys.stdin.readline(); image.release()"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "model")]
    racers = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1) for _ in range(2)
    ]
    hashes = []
    for step in range(3):
        for racer in racers:
            assert racer.stdin is not None
            assert racer.stdout is not None
            if step == 0:
                assert racer.stdout.readline() == "read\n"
            else:
                racer.stdin.write("\n")
        if step == 1:
            hashes = [racer.stdout.readline() for racer in racers if racer.stdout is not None]
    for racer in racers:
        with racer:
            racer.communicate(timeout=20)
        assert racer.returncode == 0
    assert len(set(hashes)) == 1
    assert len(hashes[0]) == 65
    assert not list(Path("/dev/shm").glob(f"weft-weights-{checkpoint.directory_id}-*"))


def test_a_load_takes_little_memory_beside_its_image(tmp_path: Path) -> None:
    """64 MiB of weights: the threads' buffers are all that is needed."""
    make_checkpoint(tmp_path / "model")
    checkpoint = read_checkpoint(tmp_path / "model")
    entry = TensorEntry("large", "U8", (1 << 26,), 0, 1 << 26)
    path = tmp_path / "model" / "large.safetensors"
    path.write_bytes((head := header_bytes([entry], {})) + bytes(1 << 26))
    tensors = (TensorSource(WeightsFile(LocalOrigin(path.parent), path.name), replace(entry, offset=len(head))),)
    large = replace(checkpoint, tensors=tensors, source_id=source_id(checkpoint.directory, tensors))
    with PeakMemory() as memory:
        image = write_image(large, lambda *_: None, 8)
    image.release()
    assert memory.extra_bytes < 8 * 3 * formats.PIECE_BYTES


@pytest.mark.parametrize("name", ["a\0b.safetensors", "\ud800.safetensors", "../model.safetensors", "model.bin", 1])
def test_an_index_that_names_no_file_is_refused(tmp_path: Path, name: object) -> None:
    make_checkpoint(tmp_path, 2)
    (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": {"model.norm.weight": name}}))
    with pytest.raises(BadCheckpoint, match=rf"{INDEX_FILE}: tensor model\.norm\.weight: .* is not the name of a"):
        read_checkpoint(tmp_path)


def test_a_text_config_that_is_no_object_is_refused(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    write_config(tmp_path, text_config="abc")
    with pytest.raises(BadCheckpoint, match=r"config\.json: text_config: expected an object, found 'abc'"):
        read_checkpoint(tmp_path)


@pytest.mark.parametrize(("dtype", "item_bytes"), [("F8_E4M3", 1), ("U16", 2), ("F8_E8M0", 1), ("C64", 8)])
def test_bytes_that_are_no_weights_are_refused_by_tensor(tmp_path: Path, dtype: str, item_bytes: int) -> None:
    tensors = make_checkpoint(tmp_path)
    name = "model.layers.0.mlp.up_proj.weight"
    _, shape, _ = tensors[name]
    tensors[name] = (dtype, shape, os.urandom(shape[0] * shape[1] * item_bytes))
    (tmp_path / "model.safetensors").write_bytes(safetensors_bytes(tensors))
    with pytest.raises(BadCheckpoint, match=rf"up_proj\.weight has dtype {dtype}, not a weight's"):
        read_checkpoint(tmp_path)
