"""Images in shared memory: what is written is what the checkpoint holds, found again, and gone when nobody needs it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from tests.weft.weights.checkpoints import (
    Tensors,
    make_checkpoint,
    random_tensors,
    safetensors_bytes,
    write_config,
)
from weft.errors import NotFound, Overloaded, StorageUnavailable
from weft.weights import formats, load
from weft.weights import image as image_module
from weft.weights.checkpoint import Checkpoint, read_checkpoint
from weft.weights.image import Image, find_image, image_name, is_mapped, remove_stale, write_image
from weft.weights.image_tensors import open_image
from weft.weights.safetensors import ALIGNMENT_BYTES, read_header

pytestmark = pytest.mark.usefixtures("shared_memory")
torch.set_num_threads(1)


def nothing(num_bytes: int, file: str) -> None:
    """Progress that nobody watches."""


def write(checkpoint: Checkpoint) -> Image:
    return write_image(checkpoint, nothing, 2)


@pytest.mark.parametrize("num_shards", [0, 3])
def test_an_image_holds_every_tensor_bit_for_bit(
    tmp_path: Path, num_shards: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (formats, load):
        monkeypatch.setattr(module, "PIECE_BYTES", 100)
    tensors = make_checkpoint(tmp_path / "model", num_shards)
    progress: list[int] = []
    image = write_image(read_checkpoint(tmp_path / "model"), lambda size, _: progress.append(size), 3)
    opened = open_image(image.name, image.size_bytes)
    image.release()
    assert sum(progress) == sum(len(data) for _, _, data in tensors.values())
    assert set(opened) == set(tensors)
    for name, (dtype, shape, data) in tensors.items():
        assert tuple(opened[name].shape) == shape
        assert opened[name].dtype == {"F32": torch.float32, "BF16": torch.bfloat16}[dtype]
        assert opened[name].view(torch.uint8).numpy().tobytes() == data
        assert opened[name].data_ptr() % opened[name].itemsize == 0


def test_an_image_is_a_valid_safetensors_file_with_aligned_data(tmp_path: Path) -> None:
    from safetensors import safe_open

    tensors = make_checkpoint(tmp_path / "model")
    image = write(read_checkpoint(tmp_path / "model"))
    with safe_open(image.path, framework="pt") as file:
        assert set(file.keys()) == set(tensors)
        assert file.metadata()["weights_hash"] == image.weights_hash
    assert read_header(image.path).tensors[0].offset % ALIGNMENT_BYTES == 0
    image.release()


def hash_of(directory: Path) -> str:
    image = write(read_checkpoint(directory))
    image.release()
    return image.weights_hash


def test_the_hash_is_of_the_tensors_not_of_their_files(tmp_path: Path) -> None:
    tensors = make_checkpoint(tmp_path / "one")
    make_checkpoint(tmp_path / "two", num_shards=2)
    (tmp_path / "two" / "model.safetensors").write_bytes(safetensors_bytes(dict(reversed(tensors.items()))))
    assert hash_of(tmp_path / "one") == hash_of(tmp_path / "two")


def altered(tensors: Tensors, kind: str) -> Tensors:
    """The same but for one bit, or for the places of two tensors' data."""
    first, second = "model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.up_proj.weight"
    dtype, shape, data = tensors[first]
    if kind == "bit":
        return {**tensors, first: (dtype, shape, bytes([data[0] ^ 1]) + data[1:])}
    return {**tensors, first: tensors[second], second: tensors[first]}


@pytest.mark.parametrize("kind", ["bit", "swap"])
def test_any_change_changes_the_hash(tmp_path: Path, kind: str) -> None:
    tensors = make_checkpoint(tmp_path)
    before = hash_of(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(safetensors_bytes(altered(tensors, kind)))
    assert hash_of(tmp_path) != before


def test_an_image_is_found_as_long_as_the_files_are_the_same(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "model")
    checkpoint = read_checkpoint(tmp_path / "model")
    assert find_image(checkpoint) is None
    written = write(checkpoint)
    os.close(written.fd)  # its process was killed
    found = find_image(checkpoint)
    assert found is not None
    assert (found.name, found.size_bytes, found.weights_hash) == (
        written.name,
        written.size_bytes,
        written.weights_hash,
    )
    os.utime(tmp_path / "model" / "model.safetensors", (1, 1))
    assert find_image(read_checkpoint(tmp_path / "model")) is None
    found.release()


def test_the_last_holder_removes_an_image_and_mappings_stay(tiny: Checkpoint) -> None:
    one = write(tiny)
    other = find_image(tiny)
    assert other is not None
    tensors = open_image(one.name, one.size_bytes)
    before = {name: tensor.view(torch.uint8).clone() for name, tensor in tensors.items()}
    one.release()
    assert other.is_linked()
    other.release()
    assert all(torch.equal(tensors[name].view(torch.uint8), before[name]) for name in before)
    with pytest.raises(NotFound):
        open_image(one.name, one.size_bytes)


def test_a_worker_that_is_killed_while_it_maps_an_image_holds_nothing(tiny: Checkpoint, shared_memory: Path) -> None:
    image = write(tiny)
    program = (
        "import pathlib, sys; from weft.weights import image, image_tensors\n"
        "image.SHARED_MEMORY = pathlib.Path(sys.argv[1])\n"
        "tensors = image_tensors.open_image(sys.argv[2], int(sys.argv[3])); print('mapped', flush=True); input()"
    )
    arguments = (str(shared_memory), image.name, str(image.size_bytes))
    command = [sys.executable, "-c", program, *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdout is not None
        assert worker.stdout.readline() == "mapped\n"
        assert is_mapped(image.fd)
        worker.kill()
    assert not is_mapped(image.fd)
    image.release()
    assert not image.path.exists()


def test_writing_to_a_tensor_never_reaches_the_image(tiny: Checkpoint) -> None:
    image = write(tiny)
    bytes_before = image.path.read_bytes()
    for tensor in open_image(image.name, image.size_bytes).values():
        tensor.zero_()
    assert image.path.read_bytes() == bytes_before
    image.release()


def test_stale_images_and_broken_off_writes_are_removed_unless_held(tmp_path: Path, shared_memory: Path) -> None:
    make_checkpoint(tmp_path / "model")
    make_checkpoint(tmp_path / "another")
    held = write(read_checkpoint(tmp_path / "model"))
    os.utime(tmp_path / "model" / "model.safetensors", (1, 1))
    left = write(read_checkpoint(tmp_path / "model"))
    os.close(left.fd)
    foreign = write(read_checkpoint(tmp_path / "another"))
    os.utime(tmp_path / "model" / "model.safetensors", (2, 2))
    checkpoint = read_checkpoint(tmp_path / "model")
    (shared_memory / f"{image_name(checkpoint)}.1.partial").write_bytes(b"half")
    assert sorted(remove_stale(checkpoint)) == sorted([left.name, f"{image_name(checkpoint)}.1.partial"])
    assert held.is_linked()
    assert foreign.is_linked()
    held.release()
    foreign.release()


def test_a_file_that_shrinks_while_it_is_read_leaves_no_image(tiny: Checkpoint, tmp_path: Path) -> None:
    file = tmp_path / "model" / "model.safetensors"
    os.truncate(file, 4000)
    said = r"changed while they were read: .*model\.safetensors: truncated: it ends before .* \(tensor model\."
    with pytest.raises(StorageUnavailable, match=said):
        write(tiny)
    file.unlink()
    with pytest.raises(StorageUnavailable, match=r"changed while they were read: .*model\.safetensors: no such file"):
        write(tiny)


def test_reading_can_be_stopped_and_leaves_no_image(tiny: Checkpoint) -> None:
    seen = threading.Event()

    def stop(num_bytes: int, file: str) -> None:
        seen.set()
        raise Overloaded("enough")

    with pytest.raises(Overloaded, match="enough"):
        write_image(tiny, stop, 2)
    assert seen.is_set()


def test_full_shared_memory_is_said_before_anything_is_read(tiny: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_module, "free_bytes", lambda directory: 100)
    with pytest.raises(Overloaded, match=r"no room: \d+ bytes needed, 100 free"):
        write(tiny)


def test_shared_memory_that_fills_up_meanwhile_leaves_no_image(
    tiny: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:

    def no_space(fd: int, data: memoryview, place: int) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", no_space)
    with pytest.raises(Overloaded, match="shared memory is full: No space left on device"):
        write(tiny)


def test_a_file_of_our_name_that_is_no_image_is_replaced(tiny: Checkpoint, shared_memory: Path) -> None:
    (shared_memory / image_name(tiny)).write_bytes(b"rubbish")
    assert find_image(tiny) is None
    write(tiny).release()


def test_an_image_that_cannot_be_read_for_now_is_not_held(tiny: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    image = write(tiny)

    def unreadable(path: Path) -> bytes:
        raise StorageUnavailable("too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(image_module, "_read_hash", unreadable)
        with pytest.raises(StorageUnavailable):
            find_image(tiny)
    image.release()
    assert not image.path.exists(), "its lock went with it"


def test_packed_weights_come_through_bit_for_bit(tmp_path: Path) -> None:
    """Eight-bit floats and packed integers of quantized checkpoints; nothing in between reads them as numbers."""
    fp8 = {"quant_method": "fp8", "weight_block_size": [8, 8]}
    directory = tmp_path / "model"
    directory.mkdir()
    write_config(directory, quantization_config=fp8)
    tensors = random_tensors(directory)
    for name, (_, shape, _) in tensors.items():
        if name.removesuffix(".weight") + ".weight_scale_inv" in tensors:
            tensors[name] = ("F8_E4M3", shape, os.urandom(shape[0] * shape[1]))
    (directory / "model.safetensors").write_bytes(safetensors_bytes(tensors))
    image = write(read_checkpoint(directory))
    opened = open_image(image.name, image.size_bytes)
    image.release()
    assert {tensor.dtype for tensor in opened.values()} == {torch.float32, torch.bfloat16, torch.float8_e4m3fn}
    for name, (_, _, data) in tensors.items():
        assert opened[name].contiguous().view(torch.uint8).numpy().tobytes() == data
