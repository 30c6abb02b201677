"""What becomes of a tensor in a bundle: whatever it is, the same again, and never much more than it was."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.bundle.bundles import assert_restored, files_of, make_bundle
from tests.weft.weights.checkpoints import Tensors, nothing, safetensors_bytes
from weft.weights.safetensors import DTYPE_BYTES
from weft_bundle import convert, format


def normal(rows: int, columns: int) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(7))


UNLIKE = {
    "rows": torch.where(torch.arange(4096)[:, None] % 16 == 0, 0, normal(4096, 256)),
    "blocks of columns": torch.where(torch.arange(4096) // 64 % 16 == 0, 0, normal(256, 4096)),
    "evenly spread": torch.linspace(-1, 1, 1 << 20),
}
"""Of the first two, just what is zero is looked at."""


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", UNLIKE)
def test_a_tensor_that_is_not_like_its_sample_stays_as_it_is(tmp_path: Path, kind: str, dtype: torch.dtype) -> None:
    (tmp_path / "model").mkdir()
    save_file({"a": UNLIKE[kind].to(dtype), "b": normal(300, 200).to(dtype)}, tmp_path / "model/model.safetensors")
    heard: list[int] = []
    for threads in (1, 3):
        convert.compress(tmp_path / "model", tmp_path / f"bundle{threads}", threads, lambda _, size: heard.append(size))
    one, other = (tmp_path / f"bundle{threads}/model.weft" for threads in (1, 3))
    assert one.read_bytes() == other.read_bytes()
    unlike, like = format.read_bundle_header(one).tensors
    assert (unlike.codec, like.codec) == ("raw", "rans")
    assert unlike.size_bytes < 1.0001 * unlike.original_bytes
    assert sum(heard) == 2 * (unlike.original_bytes + like.original_bytes), "each byte once, though written twice"
    convert.verify(tmp_path / "bundle3", 1, nothing)
    convert.decompress(tmp_path / "bundle3", tmp_path / "again", 1, nothing)
    assert files_of(tmp_path / "again") == files_of(tmp_path / "model")


def test_tensors_of_every_dtype_are_kept(tmp_path: Path) -> None:
    assert {"U16": 2, "U32": 4, "U64": 8, "F8_E8M0": 1, "C64": 8}.items() < DTYPE_BYTES.items()
    assert {"F8_E4M3FNUZ": 1, "F8_E5M2FNUZ": 1}.items() < DTYPE_BYTES.items()
    tensors: Tensors = {dtype: (dtype, (3, 5), os.urandom(15 * size)) for dtype, size in DTYPE_BYTES.items()}
    (tmp_path / "model").mkdir()
    (tmp_path / "model/model.safetensors").write_bytes(safetensors_bytes(tensors))
    convert.compress(tmp_path / "model", tmp_path / "bundle", 1, nothing)
    convert.verify(tmp_path / "bundle", 1, nothing)
    assert_restored(tmp_path)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fnuz, torch.float8_e5m2fnuz])
def test_what_safetensors_writes_for_amds_gpus_is_kept(tmp_path: Path, dtype: torch.dtype) -> None:
    make_bundle(tmp_path, {"a": normal(3, 5).to(dtype)})
    assert_restored(tmp_path)
