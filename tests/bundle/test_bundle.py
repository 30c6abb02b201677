"""Bundles: byte for byte there and back, readable in any part."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from loadtest.weights.loader import PeakMemory

from tests.bundle.bundles import assert_restored, files_of, make_bundle
from tests.weft.weights.checkpoints import nothing
from weft.errors import BadCheckpoint
from weft.weights.checkpoint import read_checkpoint
from weft.weights.image import write_image
from weft.weights.image_tensors import open_image
from weft.weights.storage import FileBlob, Scratch
from weft_bundle import convert, format
from weft_bundle.inspection import svg_chart, tensor_rows, total_entropy
from weft_bundle.unpack import BundleFile

NANO = Path(__file__).parents[2] / "models/weft-nano"
ZIPNN_SHARE = 0.6701  # of the same file, by ZipNN 0.5.4: docs/results/bundles.md


def test_there_and_back_is_the_same_to_the_byte(checkpoint: Path, bundle: Path, tmp_path: Path) -> None:
    heard: list[int] = []
    outcome = convert.decompress(bundle, tmp_path / "again", 2, lambda name, size: heard.append(size))
    assert files_of(tmp_path / "again") == files_of(checkpoint)
    weights = sum(path.stat().st_size for path in checkpoint.glob("*.safetensors"))
    assert outcome.original_bytes == weights
    assert outcome.stored_bytes < 0.7 * weights
    assert 0.9 * weights < sum(heard) <= weights
    assert not list(bundle.glob("*.safetensors"))
    assert convert.verify(bundle, 2, nothing).num_files == 2


def test_any_run_of_bytes_can_be_read(checkpoint: Path, bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = next(checkpoint.glob("*-00001-*")).read_bytes()
    with closing(BundleFile.open(next(bundle.glob("*-00001-*")))) as file:
        header = len(file.original_header())
        tensor = max(file.header.tensors, key=lambda tensor: tensor.original_bytes)
        start = header + sum(t.original_bytes for t in file.header.tensors[: file.header.tensors.index(tensor)])
        whole = raw[start : start + tensor.original_bytes]
        rng = np.random.default_rng(0)
        for _ in range(20):
            first, end = sorted(int(n) for n in rng.integers(0, len(whole), 2))
            out = np.empty(end - first + 1, np.uint8)[1:]  # not aligned for 16-bit numbers
            file.read_into(tensor.name, first, out)
            assert out.tobytes() == whole[first:end]
        with pytest.raises(BadCheckpoint, match="there is no tensor nonsense"):
            file.read_into("nonsense", 0, np.empty(1, np.uint8))


class CountingBlob(FileBlob):
    """Remembers which bytes of the file were asked for."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, direct=False)
        self.asked = list[range]()

    def read(self, offset: int, size: int, scratch: Scratch) -> memoryview:
        self.asked.append(range(offset, offset + size))
        return super().read(offset, size, scratch)


@pytest.mark.parametrize(("degree", "rank"), [(2, 0), (4, 1), (4, 3), (3, 1)])
def test_a_rank_reads_the_chunks_of_its_rows_and_no_others(tmp_path: Path, degree: int, rank: int) -> None:
    weight = torch.randn(1536, 1024, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
    make_bundle(tmp_path, {"weight": weight}, 2)
    blob = CountingBlob(tmp_path / "bundle/model.weft")
    with closing(BundleFile("model.weft", blob)) as file:
        tensor = file.tensor("weight")
        assert tensor.codec == "rans"
        out = np.empty(tensor.original_bytes // degree, np.uint8)
        blob.asked.clear()
        file.read_into("weight", rank * len(out), out)
    rows = weight.chunk(degree)[rank].contiguous()
    assert out.tobytes() == rows.view(torch.uint8).numpy().tobytes()
    first, end = rank * len(out) // format.CHUNK_BYTES, -(-(rank + 1) * len(out) // format.CHUNK_BYTES)
    tables = blob.asked[:-1]  # all the tensor's chunks share them
    assert sum(map(len, tables)) < 8 * 1024
    assert len(blob.asked[-1]) == pytest.approx(tensor.size_bytes * (end - first) / tensor.num_chunks, rel=0.02)


def test_workers_see_the_same_weights_through_a_bundle(checkpoint: Path, bundle: Path) -> None:
    images = []
    for directory in (checkpoint, bundle):
        image = write_image(read_checkpoint(directory), lambda size, name: None, 2)
        try:
            images.append((image.weights_hash, open_image(image.name, image.size_bytes)))
        finally:
            image.release()
    (hash_a, tensors_a), (hash_b, tensors_b) = images
    assert hash_a == hash_b
    assert set(tensors_a) == set(tensors_b)
    assert all(torch.equal(tensors_a[name], tensors_b[name]) for name in tensors_a)


def test_what_is_not_coded_stays_as_it_is(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    noise = torch.randint(-(1 << 15), 1 << 15, (200, 300), dtype=torch.int16, generator=generator)
    tensors = {
        "noise": noise.view(torch.bfloat16), "small": torch.zeros(5, dtype=torch.bfloat16), "none": torch.zeros(0, 7),
        "f32": torch.randn(100, 100), "i64": torch.arange(40000), "half": torch.randn(300, 200).half() * 0.02,
        "f8": torch.randn(300, 200).to(torch.float8_e4m3fn), "scalar": torch.tensor(3.0),
    }  # fmt: skip
    make_bundle(tmp_path, tensors)
    codecs = {tensor.name: tensor.codec for tensor in format.read_bundle_header(tmp_path / "bundle/model.weft").tensors}
    assert codecs == {name: "rans" if name == "half" else "raw" for name in tensors}
    assert_restored(tmp_path)


@pytest.mark.parametrize("work", ["compress", "decompress", "verify"])
def test_what_the_index_names_must_be_there(checkpoint: Path, bundle: Path, tmp_path: Path, work: str) -> None:
    directory = checkpoint if work == "compress" else bundle
    rest = () if work == "verify" else (tmp_path / "out",)
    index = directory / "model.safetensors.index.json"
    fields = json.loads(index.read_text())
    moved = {**fields["weight_map"], "model.norm.weight": "model-00001-of-00002.safetensors"}
    other = {**fields["weight_map"], "model.norm.weight": "model-00002-of-00002.safetensors"}
    index.write_text(json.dumps({**fields, "weight_map": moved if moved != fields["weight_map"] else other}))
    with pytest.raises(BadCheckpoint, match=r"-of-00002\.\w+: tensor model\.norm\.weight is not in it"):
        getattr(convert, work)(directory, *rest, 1, nothing)
    index.write_text(json.dumps(fields))
    next(directory.glob("*-00002-*")).unlink()
    with pytest.raises(BadCheckpoint, match=r"model-00002-of-00002\.\w+: no such file; model\.safetensors\.index"):
        getattr(convert, work)(directory, *rest, 1, nothing)
    assert not (tmp_path / "out.partial").exists()


def test_a_wrong_model_is_named(bundle: Path) -> None:
    fields = json.loads((bundle / "config.json").read_text())
    (bundle / "config.json").write_text(json.dumps({**fields, "intermediate_size": 168}))
    with pytest.raises(BadCheckpoint, match=r"\.weft: tensor .* has shape .*, config.json asks for"):
        read_checkpoint(bundle)


def test_threads_share_one_open_file(checkpoint: Path, bundle: Path) -> None:
    with closing(BundleFile.open(next(bundle.glob("*-00001-*")))) as file, ThreadPoolExecutor(4) as threads:
        tensors = file.header.tensors * 4

        def read(name: str, size: int) -> bytes:
            out = np.empty(size, np.uint8)
            file.read_into(name, 0, out)
            return out.tobytes()

        found = list(threads.map(lambda t: (t.name, read(t.name, t.original_bytes)), tensors))
    assert len(set(found)) == len({name for name, _ in found})


@pytest.mark.timeout(150)
def test_the_commands(checkpoint: Path, tmp_path: Path) -> None:
    def weft(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
        program = "from weft.cli.main import main; main()"
        command = [sys.executable, "-c", program, *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)

    made = weft("compress", checkpoint, tmp_path / "bundle", "--threads", "1")
    assert made.returncode == 0, made.stderr
    assert "2 files" in made.stdout, made.stderr
    assert convert.verify(tmp_path / "bundle", 1, nothing).num_files == 2
    refused = weft("compress", checkpoint, tmp_path / "bundle")
    assert refused.returncode == 2
    assert refused.stderr.strip().endswith("choose another place or remove it")


def test_inspection_shows_the_bound(bundle: Path) -> None:
    heard: list[int] = []
    rows = list(tensor_rows(bundle, lambda name, size: heard.append(size)))
    assert sum(heard) == sum(row.original_bytes for row in rows)
    coded = [row for row in rows if row.codec == "rans"]
    assert coded
    assert all(row.entropy is not None and row.share < row.entropy + 0.03 for row in coded)
    assert all(row.entropy is not None for row in rows), "small ones, which stay as they are, have a bound too"
    assert max(row.entropy or 0 for row in rows) > total_entropy(rows) > 0.6
    assert svg_chart("a <bundle>", rows).count("<rect") == 2 * len(rows)


def test_inspection_takes_little_memory_for_a_large_tensor(tmp_path: Path) -> None:
    make_bundle(tmp_path, {"large": torch.zeros(1 << 25, dtype=torch.bfloat16)})
    with PeakMemory() as memory:
        (row,) = tensor_rows(tmp_path / "bundle", nothing)
    assert (row.original_bytes, row.entropy) == (1 << 26, 0)
    assert memory.extra_bytes < row.original_bytes


def test_the_shipped_model_takes_less_than_66_hundredths_and_less_than_zipnn_makes_of_it(tmp_path: Path) -> None:
    convert.compress(NANO, tmp_path / "bundle", 1, nothing)
    share = (tmp_path / "bundle/model.weft").stat().st_size / (NANO / "model.safetensors").stat().st_size
    assert share <= 0.66
    assert share <= ZIPNN_SHARE - 0.003


def test_what_zipnn_makes_of_the_shipped_model_is_what_was_written_down() -> None:
    zipnn = pytest.importorskip("zipnn")
    content = bytearray((NANO / "model.safetensors").read_bytes())
    size = len(content)
    coded = zipnn.ZipNN(bytearray_dtype="bfloat16", threads=1).compress(content)
    assert len(coded) / size == pytest.approx(ZIPNN_SHARE, abs=0.0005)
