"""Damage to a bundle is named by file, tensor and chunk, and leaves nothing behind."""

from __future__ import annotations

import errno
import os
import struct
import zlib
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from tests.bundle.bundles import make_bundle
from tests.weft.weights.checkpoints import nothing
from weft.errors import BadCheckpoint, StorageUnavailable
from weft.weights import storage
from weft.weights.checkpoint import TensorSource, read_checkpoint
from weft.weights.formats import TensorEntry
from weft.weights.image import write_image
from weft.weights.load import ImageLayout, files_reader
from weft.weights.storage import LocalOrigin, Scratch, WeightsFile
from weft_bundle import convert, format
from weft_bundle.atomic_directory import NOTE
from weft_bundle.unpack import BundleFile


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 0x10
    path.write_bytes(content)


def a_coded_chunk(path: Path) -> tuple[str, int]:
    header = format.read_bundle_header(path)
    tensor = next(tensor for tensor in header.tensors if tensor.codec == "rans")
    return tensor.name, tensor.offset + tensor.size_bytes // 2


def with_tensors(path: Path, change: Callable[[format.PackedTensor], format.PackedTensor], times: int = 1) -> None:
    """A header that says so of every tensor, so many times, and is whole."""
    header = format.read_bundle_header(path)
    write_header(path, replace(header, tensors=tuple(change(tensor) for tensor in header.tensors) * times))


def with_original(path: Path, is_checked: bool = True, **said: Any) -> None:
    """A header that says so of the file that it was made of, and is whole."""
    header = format.read_bundle_header(path)
    with pytest.MonkeyPatch.context() as patch:
        if not is_checked:
            patch.setattr(format, "MAX_UNPACKED_BYTES", 1 << 40)
        write_header(path, replace(header, original=replace(header.original, **said)))


def write_header(path: Path, header: format.BundleHeader) -> None:
    with path.open("r+b") as file:
        file.seek(0, os.SEEK_END)
        format.write_header(file, header)


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "truncated": (lambda path: os.truncate(path, path.stat().st_size - 100), "truncated: the bundle has"),
    "a header bit": (lambda path: flip(path, path.stat().st_size - 20), "the header is damaged: its checksum"),
    "another version": (lambda path: flip(path, 8), "a bundle of version 18; this program reads version 2"),
    "no bundle": (lambda path: flip(path, 0), "not a bundle"),
    "not finished": (lambda path: path.write_bytes(bytes(64)), "not finished"),
    "an impossible base": (
        lambda path: with_tensors(path, lambda tensor: replace(tensor, base=1 << 70)),
        "no exponent is near base",
    ),
    "no name": (lambda path: with_tensors(path, lambda tensor: replace(tensor, name=cast("str", ["a"]))), "is called"),
    "a name that is no text": (
        lambda path: with_tensors(path, lambda tensor: replace(tensor, name="\ud800")),
        r"a tensor is called '\\ud800'",
    ),
    "very many dimensions": (
        lambda path: with_tensors(path, lambda tensor: replace(tensor, shape=(2,) * 17)),
        "a size is not a whole number, or there are more than 16",
    ),
    "a dimension of thousands of digits": (
        lambda path: with_tensors(path, lambda tensor: replace(tensor, shape=(0, 10**4000))),
        "a size is not a whole number, or there are more than 16",
    ),
    "a header that is much longer than it looks": (
        lambda path: with_original(path, name=" " * format.MAX_UNPACKED_BYTES, is_checked=False),
        "the header is not one of format 2: cut off, or longer than 33554432 bytes",
    ),
    "twice": (lambda path: with_tensors(path, lambda tensor: tensor, 2), "names a tensor twice"),
    "over one another": (
        lambda path: with_tensors(path, lambda tensor: replace(tensor, offset=64)),
        "tensor .* overlaps what is before it",
    ),
    "more than there was": (
        lambda path: with_original(path, size_bytes=1000),
        r"do not add up to the 1000 bytes of model-00002-of-00002\.safetensors",
    ),
    "much less than there was": (lambda path: with_original(path, size_bytes=1 << 40), "do not add up to"),
    "no size": (lambda path: with_original(path, size_bytes="all"), "made of is damaged"),
    "a negative place": (lambda path: with_original(path, header_offset=-64), "made of is damaged"),
    "no file's name": (lambda path: with_original(path, name=3), "made of is damaged"),
    "empty": (lambda path: path.write_bytes(b""), "not finished"),
}


def test_a_header_that_no_reader_would_take_is_not_written(bundle: Path) -> None:
    with pytest.raises(BadCheckpoint, match=r"tensors are too many for one file of a bundle"):
        with_original(next(bundle.glob("*-00002-*")), name=" " * format.MAX_UNPACKED_BYTES)


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_to_the_frame_names_the_file(bundle: Path, name: str) -> None:
    path = next(bundle.glob("*-00002-*"))
    DAMAGE[name][0](path)
    with pytest.raises(BadCheckpoint, match=DAMAGE[name][1]) as caught:
        convert.verify(bundle, 1, nothing)
    assert path.name in str(caught.value)
    with pytest.raises(BadCheckpoint, match=path.name):
        read_checkpoint(bundle)


@pytest.mark.usefixtures("shared_memory")
def test_a_flipped_bit_names_tensor_and_chunk_and_leaves_nothing(bundle: Path, tmp_path: Path) -> None:
    path = next(bundle.glob("*-00001-*"))
    name, at = a_coded_chunk(path)
    flip(path, at)
    expected = rf"{path.name}: tensor {name}: chunk \d+ is damaged"
    with pytest.raises(BadCheckpoint, match=expected):
        convert.verify(bundle, 1, nothing)
    with pytest.raises(BadCheckpoint, match=expected):
        convert.decompress(bundle, tmp_path / "again", 1, nothing)
    assert not (tmp_path / "again").exists()
    assert [path.name for path in (tmp_path / "again.partial").iterdir()] == [NOTE]
    with pytest.raises(BadCheckpoint, match=expected):
        write_image(read_checkpoint(bundle), lambda size, file: None, 2)


def test_of_several_chunks_that_are_damaged_the_first_is_named(tmp_path: Path) -> None:
    """They are decoded side by side, where words may tell of damage; to other bits only the checksum does."""
    path = make_bundle(tmp_path, {"w": torch.randn(1024, 768).bfloat16()})
    with closing(BundleFile.open(path)) as bundle:
        opened = bundle._open("w", Scratch())
    flip(path, opened.begin + int(opened.ends[0]) - 16)
    flip(path, opened.begin + int(opened.ends[0]) + format.CHUNK_HEAD.size)
    with pytest.raises(BadCheckpoint, match="tensor w: chunk 0 is damaged"):
        convert.verify(tmp_path / "bundle", 1, nothing)


def test_damage_to_a_file_that_is_being_written_anew_is_not_final(bundle: Path) -> None:
    """A bundle that is copied over while it is loaded: chunks of two models, and well when it is read again."""
    path = next(bundle.glob("*-00001-*"))
    checkpoint = read_checkpoint(bundle)
    _, at = a_coded_chunk(path)
    flip(path, at)
    os.utime(path, (1, 1))
    with pytest.raises(StorageUnavailable, match=rf"files changed while they were read: .*{path.name}: tensor .* is"):
        write_image(checkpoint, lambda size, file: None, 2)


@pytest.mark.parametrize(
    "ends", [(2**63 - 1, -2), (2**62, 2**62 + 16), (0, 0), (-(2**63), 2**63 - 1), (16, 300_000), (300_000, 300_100)]
)
def test_places_of_chunks_beyond_the_tensor_are_refused(tmp_path: Path, ends: tuple[int, int]) -> None:
    path = make_bundle(tmp_path, {"w": torch.randn(1024, 768).bfloat16()})
    (tensor,) = format.read_bundle_header(path).tensors
    assert tensor.num_chunks == 3
    assert tensor.codec == "rans"
    with path.open("r+b") as file:
        file.seek(tensor.offset)
        file.write(struct.pack("<qq", *ends))  # the last one stays what it was
    with pytest.raises(BadCheckpoint, match="tensor w: its table of chunks is damaged"):
        convert.verify(tmp_path / "bundle", 1, nothing)


@pytest.mark.parametrize("name", ["a\0b.safetensors", "\ud800.safetensors", "../model.safetensors", "model.bin"])
def test_a_name_that_no_file_can_have_is_refused(bundle: Path, tmp_path: Path, name: str) -> None:
    with_original(path := next(bundle.glob("*-00002-*")), name=name)
    with pytest.raises(BadCheckpoint, match=rf"{path.name}: .* is not the name of a safetensors file"):
        convert.decompress(bundle, tmp_path / "again", 1, nothing)


@pytest.mark.parametrize("change", ["name", "dtype", "shape", "missing"])
def test_what_is_served_is_what_is_restored(bundle: Path, tmp_path: Path, change: str) -> None:
    """A loader goes by the bundle's own header, decompression by the kept one of the original."""
    path = next(bundle.glob("*-00002-*"))
    header = format.read_bundle_header(path)
    *others, last = header.tensors
    altered = {
        "name": [replace(last, name="another")], "dtype": [replace(last, dtype="F16")],
        "shape": [replace(last, shape=(1, *last.shape))], "missing": [],
    }[change]  # fmt: skip
    write_header(path, replace(header, tensors=(*others, *altered)))
    (bundle / "model.safetensors.index.json").unlink()
    said = (
        r"model-00002-of-00002\.weft: (tensor .* was another one|.* bytes at the end belong to|.* had \d+ tensors, not)"
    )
    with pytest.raises(BadCheckpoint, match=said):
        convert.verify(bundle, 1, nothing)
    with pytest.raises(BadCheckpoint, match=said):
        convert.decompress(bundle, tmp_path / "again", 1, nothing)


def test_two_files_that_would_become_one_are_refused(bundle: Path, tmp_path: Path) -> None:
    with_original(path := next(bundle.glob("*-00002-*")), name="model-00001-of-00002.safetensors")
    with pytest.raises(BadCheckpoint, match=rf"{path.name}: stands for model-00001-of-00002\.safetensors, as another"):
        convert.decompress(bundle, tmp_path / "again", 1, nothing)
    assert not (tmp_path / "again.partial").exists()


def test_a_tensor_of_few_bytes_that_stands_for_very_many_is_refused(tmp_path: Path) -> None:
    """Else a file of a megabyte has every thread make room for scales of billions of rows."""
    chunks = (1 << 26) // (format.CHUNK_BYTES // 2)
    shares = np.zeros(256, "<u2")
    shares[[0, 1, 100]] = 4, 4, 256 * 256 - 8
    packed = zlib.compress(shares.view(np.uint8).reshape(-1, 2).T.tobytes())
    ends = (np.arange(1, chunks + 1) * 16).astype("<i8").tobytes()
    stored = (ends + packed).ljust(-(-(len(ends) + len(packed)) // 8) * 8, b"\0") + bytes(16 * chunks)
    tensor = format.PackedTensor("w", "BF16", (1 << 26, 1), "rans", 64, len(stored), 100, 0, len(packed))
    with (path := tmp_path / "model.weft").open("wb") as file:
        file.write(bytes(64) + stored)
        format.write_header(
            file, format.BundleHeader(format.Original("model.safetensors", 1 << 27, 0, "", 64, 0), (tensor,))
        )
    with closing(BundleFile.open(path)) as bundle, pytest.raises(BadCheckpoint, match="its table of chunks is damaged"):
        bundle.read_into("w", 0, np.empty(2, np.uint8))


def test_a_tensor_without_scales_takes_no_memory_for_them(tmp_path: Path) -> None:
    values = torch.randn(40_000, generator=torch.Generator().manual_seed(5)).bfloat16()
    make_bundle(tmp_path, {"w": values})
    with closing(BundleFile.open(tmp_path / "bundle/model.weft")) as bundle:
        assert (bundle.tensor("w").codec, bundle.tensor("w").class_bits) == ("rans", 0)
        decoder = bundle._open("w", Scratch()).decoder
        coding = decoder.coding if decoder else None
        assert coding is not None
        assert (len(coding.column_scales), coding.column_scales.strides) == (40_000, (0,))
        bundle.read_into("w", 0, out := np.empty(80_000, np.uint8))
    assert out.tobytes() == values.view(torch.uint8).numpy().tobytes()


def content_of(path: Path) -> dict[str, bytes]:
    """Every tensor, as a loader reads it."""
    found = {}
    with closing(BundleFile.open(path)) as bundle:
        for tensor in bundle.header.tensors:
            bundle.read_into(tensor.name, 0, out := np.empty(tensor.original_bytes, np.uint8))
            found[f"{tensor.name} {tensor.dtype} {tensor.shape}"] = out.tobytes()
    return found


def test_every_byte_of_a_bundle_counts(tmp_path: Path) -> None:
    """Whatever byte is wrong: an error of ours, or, in padding that nothing reads, the same weights."""
    values = (torch.randn(96, 100, generator=torch.Generator().manual_seed(4)) * 0.02).to(torch.bfloat16)
    path = make_bundle(tmp_path, {"w": values, "b": values[0].clone()})
    whole, weights = path.read_bytes(), content_of(path)
    found = 0
    for at in range(0, len(whole), 97):
        flip(path, at)
        try:
            convert.verify(tmp_path / "bundle", 1, nothing)
        except BadCheckpoint:
            found += 1
        else:
            assert content_of(path) == weights, f"byte {at} is taken for another weight"
        path.write_bytes(whole)
    assert found > 0.97 * len(range(0, len(whole), 97))


def open_as_weights(path: Path) -> None:
    """As the weights service does."""
    file = WeightsFile(LocalOrigin(path.parent), path.name)
    source = TensorSource(file, TensorEntry("a", "U8", (1,), 0, 1))
    with files_reader(ImageLayout((source,), 0, 0)):
        pass


@pytest.mark.parametrize("opened", [BundleFile.open, open_as_weights])
def test_a_bundle_that_there_is_no_memory_to_open_is_closed(
    bundle: Path, monkeypatch: pytest.MonkeyPatch, opened: Callable[[Path], Any]
) -> None:
    """A weights service that is asked again and again would have no file left to open."""

    def no_memory(size: int) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr(storage, "map_huge_pages", no_memory)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(OSError, match="Cannot allocate memory"):
        opened(next(bundle.glob("*-00001-*")))
    assert os.listdir("/proc/self/fd") == before
