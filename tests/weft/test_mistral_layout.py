"""`weft convert` links checkpoints in Mistral's own layout; logits in `test_families` come from such a one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.weft.model.test_families import logits_in_chunks
from tests.weft.tiny_families import TinyFamily, make_family
from tests.weft.tiny_tekken import tiny_tekken
from weft.cli.convert import run_convert
from weft.model.config import read_config
from weft.tokenizer import read_tokenizer
from weft.weights.checkpoint import read_checkpoint


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyFamily:
    return make_family("mistral-large3", tmp_path_factory.mktemp("large") / "m")


@pytest.fixture
def native(tiny: TinyFamily, tmp_path: Path) -> Path:
    """A directory of its own with params.json and consolidated.safetensors."""
    directory = tmp_path / "native"
    directory.mkdir()
    source = (tiny.directory / "model.safetensors").resolve().parent
    for name in ("params.json", "consolidated.safetensors"):
        (directory / name).write_bytes((source / name).read_bytes())
    return directory


def set_params(native: Path, **changes: Any) -> None:
    values = {**json.loads((native / "params.json").read_text()), **changes}
    (native / "params.json").write_text(json.dumps(values))


def test_convert_links_shards_and_small_files(native: Path, tmp_path: Path) -> None:
    weights = load_file(native / "consolidated.safetensors")
    (native / "consolidated.safetensors").unlink()
    names = sorted(weights)
    for number, half in enumerate((names[::2], names[1::2]), 1):
        save_file({name: weights[name] for name in half}, native / f"consolidated-0000{number}-of-00002.safetensors")
    (native / "tekken.json").write_text(json.dumps(tiny_tekken()))
    assert run_convert(native, tmp_path / "out") == 0
    checkpoint = read_checkpoint(tmp_path / "out")
    assert {source.entry.name for source in checkpoint.tensors} == {each for each in names if "vision" not in each}
    assert (tmp_path / "out" / "tekken.json").resolve() == native / "tekken.json"
    assert b"<SPECIAL_3>" in read_tokenizer(tmp_path / "out")


def test_fp8_gives_the_logits_of_its_unpacked_weights(tiny: TinyFamily, native: Path, tmp_path: Path) -> None:
    """The factor of a tensor is qscale_weight; scales of activations are not read, and the router stays as it is."""
    packed, unpacked = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
    for name, tensor in load_file(native / "consolidated.safetensors").items():
        module = name.removesuffix(".weight")
        unpacked[name] = packed[name] = tensor
        if tensor.ndim == 2 and not module.endswith(("gate", "tok_embeddings", "output", "wkv_a_with_mqa")):
            scale = tensor.abs().max() / 440
            packed[name] = (tensor / scale).to(torch.float8_e4m3fn)
            packed |= {f"{module}.qscale_weight": scale, f"{module}.qscale_act": torch.tensor(2.0)}
            unpacked[name] = packed[name].float() * scale
    save_file(packed, native / "consolidated.safetensors")
    set_params(native, quantization={"qformat_weight": "fp8_e4m3", "qscheme_act": "TENSOR"})
    assert run_convert(native, tmp_path / "out") == 0
    quantized = TinyFamily(tiny.oracle, tmp_path / "out", read_config(tmp_path / "out"))
    assert quantized.config.quantization is not None
    plain = tmp_path / "plain"
    plain.mkdir()
    (plain / "config.json").write_bytes((tiny.directory / "config.json").read_bytes())
    save_file(unpacked, plain / "model.safetensors")
    expected = logits_in_chunks(TinyFamily(tiny.oracle, plain, tiny.config), 80)
    torch.testing.assert_close(logits_in_chunks(quantized, 80), expected, rtol=1e-4, atol=1e-4)


def test_scores_do_not_grow_without_apply_scale(tiny: TinyFamily, native: Path, tmp_path: Path) -> None:
    yarn = json.loads((native / "params.json").read_text())["yarn"]
    set_params(native, yarn={**yarn, "apply_scale": False})
    assert run_convert(native, tmp_path / "out") == 0
    latent = read_config(tmp_path / "out").latent
    assert latent is not None
    assert latent.scale == (latent.nope_dim + latent.rope_dim) ** -0.5
    assert tiny.config.latent is not None
    assert latent.scale < tiny.config.latent.scale


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"moe": None}, ["params.json", "moe", "Large 3", "Hugging Face"]),
        ({"kv_lora_rank": None}, ["params.json", "Large 3", "Hugging Face"]),
        ({"n_layers": 4}, ["native", "layers.3", "missing"]),
        ({"quantization": {"qformat_weight": "int3"}}, ["qformat_weight", "int3"]),
    ],
)
def test_convert_names_what_it_cannot_read(
    native: Path, tmp_path: Path, changes: dict[str, Any], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    set_params(native, **changes)
    assert run_convert(native, tmp_path / "out") == 2
    said = capsys.readouterr().err
    assert all(word in said for word in words), said
    assert said.count("\n") == 1
    assert [each.name for each in tmp_path.iterdir()] == ["native"]


def test_convert_overwrites_nothing(native: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "out").mkdir()
    assert run_convert(native, tmp_path / "out") == 2
    assert "exists already" in capsys.readouterr().err
