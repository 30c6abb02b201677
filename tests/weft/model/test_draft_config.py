"""Configs and tensors of draft heads: what is read, and what is refused by name before anything is loaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.weft.model.eagle.heads import TARGET, Head, read_head
from weft.errors import BadCheckpoint, ConfigError
from weft.model.draft import vocabulary_map
from weft.model.draft_config import DraftConfig
from weft.model.draft_layers import Producer, default_reading, parse_boundaries, readings
from weft.model.spec import FINAL, HeadNorm, LayerSpec
from weft.weights.draft_checkpoint import read_draft_checkpoint

ZEROS = torch.zeros(4, 4)
GATE = "midlayer.mlp.gate_proj.weight"
Change = Callable[[Head], Any]


def read_changed(name: str, change: Change, directory: Path) -> DraftConfig:
    head = read_head(name)
    change(head)
    return read_draft_checkpoint(head.write(directory), TARGET).config


def drop(head: Head, *names: str) -> None:
    for name in names:
        del head.tensors[name]


def eagle_flag(**flags: Any) -> Change:
    return lambda head: head.config["eagle_config"].update(flags)


REFUSED: dict[str, tuple[str, Change, str]] = {
    "missing": ("safeai", lambda head: drop(head, GATE), f"tensor {GATE} is missing"),
    "extra": (
        "safeai",
        lambda head: head.tensors.update(router=ZEROS),
        "tensor router is not part of a head of SafeAI",
    ),
    "shape": (
        "modelopt",
        lambda head: head.tensors.update({"norm.weight": torch.ones(63)}),
        r"tensor norm.weight has shape \[63\], config.json asks for \[64\]",
    ),
    "dtype": (
        "kimi",
        lambda head: head.tensors.update({"norm.weight": torch.ones(64, dtype=torch.int32)}),
        "tensor norm.weight has dtype I32, not a weight's",
    ),
    "map": ("safeai", lambda head: head.tensors.update(d2t=ZEROS.long()), r"d2t is I64 \[4, 4\], expected I64 \[48\]"),
    "no map": ("safeai", lambda head: drop(head, "d2t"), "tensor d2t is missing, which maps 48 draft tokens"),
    "fc norms": (
        "specforge31",
        lambda head: head.config.update(fc_norm=False),
        "tensor fc_norm.0.weight is not part of a head",
    ),
    "eagle 1": (
        "safeai",
        lambda head: drop(head, "midlayer.hidden_norm.weight"),
        "tensor hidden_norm.weight is missing: it is an EAGLE-1 head",
    ),
    "eagle 1 fc": (
        "safeai",
        lambda head: head.tensors.update({"fc.weight": torch.zeros(64, 128)}),
        r"tensor fc.weight has shape \[64, 128\], .* EAGLE-1 head; take an EAGLE-3 head",
    ),
    "layers": (
        "speculators",
        lambda head: head.config["transformer_layer_config"].update(num_hidden_layers=2),
        r"config.json: transformer_layer_config.num_hidden_layers: 2 is not supported",
    ),
    "mtp norms": ("modelopt", eagle_flag(use_mtp_layernorm=True), "eagle_config.use_mtp_layernorm: True is not"),
    "projection": ("modelopt", eagle_flag(eh_proj_before_attn=True), "eagle_config.eh_proj_before_attn: True is not"),
    "parallel": ("modelopt", eagle_flag(parallel_draft_step=4), "eagle_config.parallel_draft_step: 4 is not supported"),
    "no norm": (
        "modelopt",
        eagle_flag(use_input_layernorm_in_first_layer=False),
        "eagle_config.use_input_layernorm_in_first_layer: false is not supported",
    ),
    "other kind": (
        "speculators",
        lambda head: head.config.update(speculators_model_type="peagle"),
        "speculators_model_type: 'peagle' is not supported; take an EAGLE-3 head",
    ),
    "parallel kind": (
        "specforge",
        lambda head: head.config.update(architectures=["PEagleDraftModel"]),
        "architectures: PEagleDraftModel drafts all tokens at once",
    ),
    "plain model": (
        "specforge",
        lambda head: (head.config.update(architectures=["LlamaForCausalLM"]), head.config.pop("draft_vocab_size")),
        "architectures: 'LlamaForCausalLM' is no EAGLE-3 head",
    ),
    "two norms": (
        "specforge31",
        lambda head: head.config.update(norm_before_fc=True),
        "fc_norm: true together with norm_before_fc",
    ),
    "target": ("specforge", lambda head: head.config.update(target_hidden_size=96), "target_hidden_size: 96, but the"),
    "vocabulary": (
        "specforge",
        lambda head: head.config.update(vocab_size=100),
        "vocab_size: 100 is below the target's",
    ),
    "large": ("specforge", lambda head: head.config.update(draft_vocab_size=129), "draft_vocab_size: 129 is above the"),
    "no head": ("specforge", lambda head: drop(head, "lm_head.weight"), "draft_vocab_size: 48 needs lm_head.weight"),
    "ids": ("speculators", lambda head: head.config.update(eagle_aux_hidden_state_layer_ids=[2, 6, 13]), "12 layers"),
    "count": ("specforge", lambda head: head.config.update(num_aux_hidden_states=2), "num_aux_hidden_states: 2, but"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_head_is_refused_with_its_file_and_field(case: str, tmp_path: Path) -> None:
    name, change, message = REFUSED[case]
    with pytest.raises(BadCheckpoint, match=message) as error:
        read_changed(name, change, tmp_path)
    assert str(tmp_path) in str(error.value)
    assert "\n" not in str(error.value)


def test_pickled_head_is_refused(tmp_path: Path) -> None:
    directory = read_head("safeai").write(tmp_path)
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")
    with pytest.raises(BadCheckpoint, match=r"pytorch_model\.bin: pickled weights can run code and are not read"):
        read_draft_checkpoint(directory, TARGET)


def test_config_follows_fields_and_tensors(tmp_path: Path) -> None:
    qwen = read_changed("speculators-qwen3", lambda head: None, tmp_path)
    assert qwen.layer.head_norm is HeadNorm.WEIGHTED
    assert not qwen.is_residual_normed
    older = read_changed("speculators", lambda head: head.config.pop("norm_before_residual"), tmp_path)
    assert older.is_residual_normed
    post_norm = read_changed("modelopt", eagle_flag(return_hidden_post_norm=True), tmp_path)
    assert post_norm.is_recycled_normed
    shared = read_changed("specforge31", lambda head: None, tmp_path)
    assert (shared.has_embedding, shared.has_output, shared.vocab_size) == (False, False, TARGET.vocab_size)


def test_named_boundaries_are_taken_as_they_are(tmp_path: Path) -> None:
    """Weft's own trainer names them, next to ids that mean the same to SpecForge's readers."""
    config = read_changed("specforge", eagle_flag(boundaries=[1, 3, 12]), tmp_path)
    assert config.boundaries == (1, 3, 12)
    with pytest.raises(BadCheckpoint, match=r"eagle_config.boundaries: \[1, 3, 13\], but the target has 12 layers"):
        read_changed("specforge", eagle_flag(boundaries=[1, 3, 13]), tmp_path)


@pytest.mark.parametrize("is_fused", [False, True])
def test_head_of_the_final_state_has_one_feature(is_fused: bool, tmp_path: Path) -> None:
    def change(head: Head) -> None:
        head.config["eagle_config"].update(use_aux_hidden_state=False)
        fusion = head.tensors.pop("fc.weight")
        head.tensors.update({"fc.weight": fusion[:, :64].contiguous()} if is_fused else {})

    config = read_changed("modelopt", change, tmp_path)
    assert (config.is_fused, config.boundaries) == (is_fused, (FINAL,))


@pytest.mark.parametrize(
    ("producer", "layer_ids", "num_layers", "expected"),
    [
        (Producer.SAFEAI, (), 32, (2, 16, 29)),
        (Producer.SPECFORGE, (), 32, (2, 16, 29)),
        (Producer.SPECFORGE, (1, 15, 28), 32, (2, 16, 29)),  # outputs of layers
        (Producer.SPECFORGE, (3, 20, 30), 32, (4, 21, 31)),
        (Producer.SPECULATORS, (2, 16, 29), 32, (2, 16, 29)),
        (Producer.SPECULATORS, (1, 15, 28), 32, (2, 16, 29)),
        (Producer.SPECULATORS, (3, 20, 30), 32, (3, 20, 30)),
        (Producer.MODELOPT, (24, 30, 36), 36, (24, 30, 36)),  # gpt-oss v3: the last one is behind all layers
        (Producer.KIMI, (2, 30, 58), 61, (2, 30, 58)),
    ],
)
def test_ids_become_boundaries_by_producer(
    producer: Producer, layer_ids: tuple[int, ...], num_layers: int, expected: tuple[int, ...]
) -> None:
    assert default_reading(producer, layer_ids, num_layers, is_final=False) == expected


def test_readings_are_all_meanings_once() -> None:
    found = readings((1, 17, 32), (2, 18, 33), 36)
    assert found == {"chosen": (2, 18, 33), "ids": (1, 17, 32)}
    assert readings((), (FINAL,), 36) == {"chosen": (FINAL,), "last": (36,)}


def test_draft_layers_are_parsed() -> None:
    assert parse_boundaries("0, 18,36", 3, 36) == (0, 18, 36)
    assert parse_boundaries("final", 1, 36) == (FINAL,)
    for text in ("1,2", "1,2,37", "1,2,x", "-1,2,3", ""):
        with pytest.raises(ConfigError, match="--draft-layers: expected 3 boundaries from 0 to 36"):
            parse_boundaries(text, 3, 36)


def test_vocabulary_map_needs_rising_ids_of_the_target() -> None:
    assert vocabulary_map(torch.tensor([0, 2, 2]), 6).tolist() == [0, 3, 4]  # type: ignore[union-attr]
    assert vocabulary_map(torch.zeros(4, dtype=torch.int64), 4) is None
    with pytest.raises(BadCheckpoint, match="d2t: target ids must rise, but entry 2 maps to 3"):
        vocabulary_map(torch.tensor([0, 2, 1]), 6)
    with pytest.raises(BadCheckpoint, match="d2t: target id 6 is not in the target's vocabulary of 6"):
        vocabulary_map(torch.tensor([0, 2, 4]), 6)


def test_target_of_another_size_is_refused(tmp_path: Path) -> None:
    directory = read_head("specforge").write(tmp_path)
    with pytest.raises(BadCheckpoint, match="hidden_size: 64, but the target has 128; take its own head"):
        read_draft_checkpoint(directory, replace(TARGET, hidden_size=128))


def test_layer_looks_as_far_back_as_the_target(tmp_path: Path) -> None:
    """A target that keeps a window alone has no older keys for the head either."""
    windows = replace(TARGET, layers=(LayerSpec(window=8), LayerSpec(window=32)) * 6)
    mixed = replace(TARGET, layers=(LayerSpec(), LayerSpec(window=32), LayerSpec(chunk=16)) * 4)
    directory = read_head("specforge").write(tmp_path)
    for target, expected in ((TARGET, LayerSpec()), (windows, LayerSpec(window=32)), (mixed, LayerSpec())):
        assert read_draft_checkpoint(directory, target).config.layer.layers == (expected,)


def test_head_of_speculators_may_have_a_window(tmp_path: Path) -> None:
    def change(head: Head) -> None:
        head.config["transformer_layer_config"].update(sliding_window=16, layer_types=["sliding_attention"])

    assert read_changed("speculators", change, tmp_path).layer.layers == (LayerSpec(window=16),)
    assert read_changed("speculators", lambda head: None, tmp_path).layer.layers == (LayerSpec(),)
