"""A converted GGUF is the checkpoint that it was made of, by the reading of Weft and of transformers."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file
from transformers.integrations.gguf import dequant

from tests.weft.tiny_families import MINISTRAL3_ROPE, TinyFamily, make_family
from tests.weft.tiny_gguf import MERGES, SPECIAL, VOCAB_SIZE, GgufForm, add_byte_level, byte_tokens, write_gguf
from weft.cli.convert import run_convert
from weft.errors import BadCheckpoint
from weft.gguf_import import conversion
from weft.gguf_import.architectures import shortest
from weft.gguf_import.conversion import Conversion
from weft.model.config import read_config
from weft.tokenizer import check_tokenizer
from weft.weights.checkpoint import read_checkpoint

TOKENS = torch.tensor([[(11 * i * i + 7 * i + 5) % 113 for i in range(48)]])
LLAMA31 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 32}
YARN_KEYS = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 4.0,
    "rope.scaling.original_context_length": 32,
}
GEMMA_ROPE = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 100_000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
}


def llama3_factors(head_dim: int) -> list[float]:
    """What llama.cpp stores for LLAMA31: how much longer each pair's wave becomes."""
    found = []
    for index in range(0, head_dim, 2):
        wave = 2 * math.pi * 500_000.0 ** (index / head_dim)
        smooth = (8192 / wave - 1) / 3
        inner = 1 / ((1 - smooth) / 32 + smooth)
        found.append(1.0 if wave < 2048 else 32.0 if wave > 8192 else inner)
    return found


FORMS: dict[str, GgufForm] = {
    "llama": GgufForm("llama", "llama2", is_permuted=True),
    "llama3.1": GgufForm(
        "llama",
        "llama2",
        {"rope_parameters": LLAMA31, "max_position_embeddings": 131_072},
        is_permuted=True,
        tensors={"rope_freqs.weight": llama3_factors(32)},
    ),
    "mixtral": GgufForm("llama", "mixtral", is_permuted=True, more={"expert_count": 5, "expert_used_count": 2}),
    "mistral3": GgufForm(
        "mistral3",
        "ministral3",
        {"rope_parameters": {**MINISTRAL3_ROPE, "mscale": 1.0, "mscale_all_dim": 1.0}},
        is_permuted=True,
        more={
            "attention.temperature_scale": 0.4,
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 16,
            "rope.scaling.yarn_beta_fast": 4.0,
            "rope.scaling.yarn_beta_slow": 1.0,
            "rope.scaling.yarn_log_multiplier": 1.0,
        },
    ),
    "mistral-small-3": GgufForm("mistral3", "llama2", is_permuted=True),
    "qwen2": GgufForm("qwen2", "qwen2"),
    "qwen2-yarn": GgufForm("qwen2", "qwen2", {"rope_parameters": YARN, "tie_word_embeddings": False}, more=YARN_KEYS),
    "qwen3": GgufForm("qwen3", "qwen3"),
    "qwen3moe": GgufForm(
        "qwen3moe",
        "qwen3-moe",
        {"mlp_only_layers": []},
        more={"expert_count": 6, "expert_used_count": 3, "expert_feed_forward_length": 20},
    ),
    "smollm3": GgufForm("smollm3", "smollm3", is_permuted=True),
    "granite": GgufForm(
        "granite",
        "granite",
        is_permuted=True,
        more={"embedding_scale": 3.0, "logit_scale": 5.0, "residual_scale": 0.4, "attention.scale": 0.2},
    ),
    "seed_oss": GgufForm("seed_oss", "seed-oss"),
    "ernie4_5": GgufForm("ernie4_5", "ernie"),
    "olmo2": GgufForm("olmo2", "olmo2"),
    "olmo3": GgufForm(
        "olmo2",
        "olmo3",
        more={
            "attention.sliding_window": 8,
            "attention.sliding_window_pattern": [True, False, True],
            "rope.freq_base_swa": 500.0,
            "rope.scaling.yarn_beta_fast": 4.0,
            "rope.scaling.yarn_beta_slow": 1.0,
            **YARN_KEYS,
        },
    ),
    "exaone4": GgufForm(
        "exaone4",
        "exaone4",
        more={"attention.sliding_window": 8, "attention.sliding_window_pattern": [True, False, True, False]},
    ),
    "gemma3": GgufForm(
        "gemma3",
        "gemma3",
        {"query_pre_attn_scalar": 10, "num_hidden_layers": 7, "layer_types": None, "rope_parameters": GEMMA_ROPE},
        norm_offset=1.0,
        more={"attention.sliding_window": 8, "rope.scaling.type": "linear", "rope.scaling.factor": 8.0},
    ),
    "glm4": GgufForm("glm4", "glm4", more={"rope.dimension_count": 6}),
    "phi3": GgufForm("phi3", "phi3", more={"attention.sliding_window": 8}),
    "phi3-longrope": GgufForm(
        "phi3",
        "phi3-longrope",
        more={
            "attention.sliding_window": 0,
            "rope.dimension_count": 8,
            "rope.scaling.type": "longrope",
            "rope.scaling.original_context_length": 8,
        },
        tensors={"rope_factors_short.weight": [1.0, 1.1, 1.3, 1.4], "rope_factors_long.weight": [1.0, 1.7, 2.5, 4.0]},
    ),
}


def make(folder: Path, name: str = "llama", kind: str = "F32", **sizes: Any) -> tuple[TinyFamily, Path]:
    """Return a tiny model of transformers' and the same one in GGUF."""
    form = FORMS[name]
    tiny = make_family(form.family, folder / "original", **{**form.sizes, "vocab_size": VOCAB_SIZE, **sizes})
    write_gguf(path := folder / f"{name}.gguf", tiny, form, kind)
    return tiny, path


def convert(path: Path) -> Path:
    """Convert a file beside itself."""
    Conversion(path).write(out := path.parent / "out", lambda done, total: None)
    return out


@pytest.mark.parametrize("name", FORMS)
def test_converted_model_is_the_original(tmp_path: Path, name: str) -> None:
    tiny, path = make(tmp_path, name)
    out = convert(path)
    original, converted = tiny.weights, load_file(out / "model.safetensors")
    assert original.keys() == converted.keys()
    for key, tensor in original.items():
        # Norms that llama.cpp stores as 1 + w come back with the rounding of that sum.
        error = 1e-6 if FORMS[name].norm_offset else 0
        torch.testing.assert_close(converted[key], tensor, rtol=0, atol=error, msg=key)
    assert read_config(out) == _with_end_tokens(tiny, out)
    again = type(tiny.oracle).from_pretrained(out, dtype=torch.float32, pad_token_id=0).eval()
    with torch.no_grad():
        torch.testing.assert_close(again(TOKENS).logits, tiny.oracle(TOKENS).logits, rtol=1e-4, atol=1e-4)


def _with_end_tokens(tiny: TinyFamily, out: Path) -> Any:
    """The original's config with what GGUF decides: end tokens, and no names of further tensors to ignore."""
    converted = read_config(out)
    return replace(tiny.config, eos_token_ids=converted.eos_token_ids, ignored=converted.ignored)


def test_converted_model_is_a_whole_checkpoint(tmp_path: Path) -> None:
    tiny, path = make(tmp_path)
    out = convert(path)
    assert read_checkpoint(out).total_bytes == sum(each.nbytes for each in tiny.weights.values())
    check_tokenizer(out)
    tokens = byte_tokens()
    assert read_config(out).eos_token_ids == (tokens.index("<|im_end|>"), tokens.index("<|endoftext|>"))
    assert "im_start" in (out / "chat_template.jinja").read_text()


def test_sampling_defaults_are_kept(tmp_path: Path) -> None:
    tiny, path = make(tmp_path)
    assert "do_sample" not in json.loads((convert(path) / "generation_config.json").read_text())

    def add(writer: Any) -> None:
        add_byte_level(writer)
        writer.add_float32("general.sampling.temp", 0.2)
        writer.add_float32("general.sampling.top_p", 0.9)
        writer.add_int32("general.sampling.top_k", 40)

    write_gguf(path, tiny, FORMS["llama"], add_tokenizer=add)
    shutil.rmtree(tmp_path / "out")
    found = json.loads((convert(path) / "generation_config.json").read_text())
    assert {"do_sample": True, "temperature": 0.2, "top_p": 0.9, "top_k": 40}.items() <= found.items()


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1", "Q5_1"])
def test_quantized_weights_become_bfloat16(tmp_path: Path, kind: str) -> None:
    """transformers expands the blocks by code of its own."""
    _, path = make(tmp_path, kind=kind, intermediate_size=96)
    converted = load_file(convert(path) / "model.safetensors")
    stored = {each.name: each for each in gguf.GGUFReader(path).tensors}
    tensor = stored["blk.1.ffn_down.weight"]
    if kind == "Q5_1":  # transformers cannot
        expected = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type))
    else:
        expected = dequant.dequantize(torch.from_numpy(tensor.data.copy()).flatten(), tensor.tensor_type.value)
    down = converted["model.layers.1.mlp.down_proj.weight"]
    assert torch.equal(down, expected.reshape(down.shape).to(torch.bfloat16))
    assert {each.dtype for each in converted.values()} == {torch.bfloat16}


@pytest.mark.parametrize(("kind", "dtype"), [("F16", torch.float16), ("BF16", torch.bfloat16)])
def test_plain_weights_keep_their_type(tmp_path: Path, kind: str, dtype: torch.dtype) -> None:
    tiny, path = make(tmp_path, kind=kind)
    converted = load_file(convert(path) / "model.safetensors")
    assert all(torch.equal(each, tiny.weights[name].to(dtype)) for name, each in converted.items())


def test_rows_are_expanded_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny, path = make(tmp_path, "mixtral")
    monkeypatch.setattr(conversion, "CHUNK_NUMBERS", 100)
    converted = load_file(convert(path) / "model.safetensors")
    assert all(torch.equal(each, tiny.weights[name]) for name, each in converted.items())


def test_split_model_is_converted_from_any_part(tmp_path: Path) -> None:
    tiny, path = make(tmp_path)
    reader = gguf.GGUFReader(path)
    for number in (1, 2):
        writer = gguf.GGUFWriter(tmp_path / f"m-{number:05}-of-00002.gguf", "llama")
        if number == 1:
            for key, each in list(reader.fields.items())[4:]:
                sub = each.types[-1] if each.types[0] is gguf.GGUFValueType.ARRAY else None
                writer.add_key_value(key, each.contents(), each.types[0], sub)
        for tensor in reader.tensors[number - 1 :: 2]:
            writer.add_tensor(tensor.name, tensor.data)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    converted = load_file(convert(tmp_path / "m-00002-of-00002.gguf") / "model.safetensors")
    assert all(torch.equal(each, tiny.weights[name]) for name, each in converted.items())
    (tmp_path / "m-00001-of-00002.gguf").unlink()
    with pytest.raises(BadCheckpoint, match=r"m-00001-of-00002.gguf: no such file; m-00002-of-00002.gguf is one of 2"):
        Conversion(tmp_path / "m-00002-of-00002.gguf")


@pytest.mark.parametrize("value", [1e-5, 1e-6, 500_000.0, 0.1, 1.0, 0.22])
def test_shortest_decimal_is_the_same_float32(value: float) -> None:
    stored = float(torch.tensor(value, dtype=torch.float32))
    assert shortest(stored) == value


def rewritten(path: Path, old: bytes, new: bytes) -> Path:
    """Replace bytes of a file by as many."""
    content = path.read_bytes()
    assert old in content
    assert len(old) == len(new)
    path.write_bytes(content.replace(old, new))
    return path


def drop_tensor(path: Path) -> None:
    rewritten(path, b"blk.2.ffn_down.weight", b"blk.2.ffn_gone.weight")


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "truncated": (lambda path: os.truncate(path, path.stat().st_size // 2), "not readable as GGUF"),
    "cut in its header": (lambda path: os.truncate(path, 40), "not readable as GGUF"),
    "a length beyond its end": (
        lambda path: rewritten(path, b"tokens\x09\0\0\0\x08\0\0\0", b"tokens\x09\0\0\0\0\0\0\0"),
        "not readable as GGUF",
    ),
    "a string without end": (
        lambda path: rewritten(path, b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\x0fllama"),
        "not readable as GGUF (a length in it is wrong, or its end is missing)",
    ),
    "empty": (lambda path: os.truncate(path, 0), "not readable as GGUF"),
    "no GGUF": (lambda path: path.write_bytes(b"PK\x03\x04" + bytes(99)), "not readable as GGUF"),
    "another architecture": (
        lambda path: rewritten(path, b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0mamba"),
        "architecture 'mamba' is not supported; supported: llama, ",
    ),
    "a missing key": (
        lambda path: rewritten(path, b"llama.block_count", b"llama.block_kount"),
        "llama.block_count: expected a whole number above 0, found None",
    ),
    "an unknown tensor": (drop_tensor, "tensor blk.2.ffn_gone.weight is not part of a LlamaForCausalLM"),
    "another rule of splitting": (
        lambda path: rewritten(path, b"smollm", b"smell!"),
        "tokenizer.ggml.pre: 'smell!' is not supported",
    ),
    "another kind of tokenizer": (
        lambda path: rewritten(path, b"\x04\0\0\0\0\0\0\0gpt2", b"\x04\0\0\0\0\0\0\0bert"),
        "tokenizer.ggml.model: 'bert' is not supported; supported: gpt2, llama",
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_unusable_file_is_refused_before_any_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    _, path = make(tmp_path)
    damage, expected = DAMAGE[name]
    damage(path)
    capsys.readouterr()  # transformers shows a bar
    assert run_convert(path, tmp_path / "out") == 2
    said = capsys.readouterr().err
    assert said.startswith(f"weft convert: {path}: ")
    assert expected in said
    assert said.count("\n") == 1
    assert sorted(each.name for each in tmp_path.iterdir()) == ["llama.gguf", "original"]


def test_rope_factors_of_an_unknown_rule_are_refused(tmp_path: Path) -> None:
    form = FORMS["llama"]
    tiny = make_family(form.family, tmp_path / "original", vocab_size=VOCAB_SIZE)
    form = GgufForm("llama", "llama2", is_permuted=True, tensors={"rope_freqs.weight": [1.0, 2.0, *([8.0] * 14)]})
    write_gguf(path := tmp_path / "m.gguf", tiny, form)
    with pytest.raises(BadCheckpoint, match=r"rope_freqs.weight: these factors are not those of Llama 3"):
        Conversion(path)


def test_command_makes_a_directory_named_like_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make(tmp_path)
    monkeypatch.chdir(tmp_path)
    shutil.rmtree("original")
    assert run_convert(tmp_path, None) == 0
    assert "weft up --model llama" in capsys.readouterr().out
    assert read_checkpoint(Path("llama")).tensors
    assert run_convert(tmp_path, None) == 2
    assert "llama: exists already; remove it or name another directory" in capsys.readouterr().err
    make(tmp_path, "qwen3")
    (tmp_path / "mmproj-model.gguf").touch()
    assert run_convert(tmp_path, None) == 2
    assert "has 2 models (llama.gguf, qwen3.gguf); name one file" in capsys.readouterr().err


def test_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert run_convert(Path("m.gguf"), None) == 2
    assert capsys.readouterr().err == ("weft convert: the package gguf is not installed: pip install 'weft[convert]'\n")


def test_full_disk_is_named_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _, path = make(tmp_path)

    def full(made: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(made))

    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda where: usage._replace(free=1000))
    assert run_convert(path, tmp_path / "out") == 2
    assert "GB free; free space or name a directory on another disk" in capsys.readouterr().err
    monkeypatch.undo()
    monkeypatch.setattr(conversion, "fsync_path", full)
    assert run_convert(path, tmp_path / "out") == 2
    said = capsys.readouterr().err
    assert "the disk is full; free space or name a directory on another disk" in said
    assert sorted(each.name for each in tmp_path.iterdir()) == ["llama.gguf", "original"]


def test_vocabulary_has_the_tokens_that_the_tests_need() -> None:
    assert len(set(byte_tokens())) == VOCAB_SIZE == 256 + len(MERGES) + len(SPECIAL)
