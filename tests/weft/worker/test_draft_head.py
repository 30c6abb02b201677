"""A worker's draft model: which states of the target it reads, and what stands for both in the fingerprint."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor

from tests.weft.model.test_mtp import as_stored, make_oracle
from tests.weft.tiny_families import make_family
from weft.config import shipped_model
from weft.errors import BadCheckpoint, ConfigError
from weft.model.config import read_config
from weft.model.decoder import Decoder
from weft.model.draft_layers import draft_place, with_draft
from weft.model.mtp import MtpLayer
from weft.model.spec import FINAL
from weft.worker.draft_head import (
    QUESTIONS,
    DraftImage,
    drafted_hash,
    load_draft,
    read_draft_image,
    scoring_prompts,
)

NANO = shipped_model() or Path()
CPU = torch.device("cpu")
FIELDS: dict[str, Any] = json.loads((NANO / "draft" / "config.json").read_text())
RIGHT = (1, 3, 5)


def image(tensors: dict[str, Tensor], **eagle: Any) -> DraftImage:
    """weft-nano's head with these fields in place of those that name its layers."""
    fields = {**FIELDS, "eagle_config": eagle or FIELDS["eagle_config"]}
    return read_draft_image(json.dumps(fields), tensors, "beef", read_config(NANO))


def ids(*layers: int) -> dict[str, Any]:
    return {"eagle_aux_hidden_state_layer_ids": list(layers)}


@pytest.fixture(scope="module")
def tensors() -> dict[str, Tensor]:
    return load_file(NANO / "draft" / "model.safetensors")


@pytest.fixture(scope="module")
def target(tensors: dict[str, Tensor]) -> Decoder:
    config = with_draft(read_config(NANO), image(tensors).layer)
    return Decoder(config, load_file(NANO / "model.safetensors"), torch.float32, CPU, is_resident=True)


def prompts() -> list[list[int]]:
    return scoring_prompts(NANO)


def no_prompts() -> list[list[int]]:
    raise AssertionError("nothing is to be scored")


def test_head_that_names_boundaries_is_not_scored(target: Decoder, tensors: dict[str, Tensor]) -> None:
    head = load_draft(image(tensors), target, True, "", no_prompts)
    assert (head.boundaries, head.place) == (RIGHT, draft_place(target.config))
    assert head.place == (0, 6)


@pytest.mark.parametrize("layers", [(0, 2, 4), (1, 3, 5)], ids=["outputs", "boundaries"])
def test_layer_ids_of_weft_nanos_head_are_found_by_scoring(
    layers: tuple[int, ...], target: Decoder, tensors: dict[str, Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    """SpecForge's ids name outputs, which would be wrong for the second file."""
    with caplog.at_level(logging.INFO):
        head = load_draft(image(tensors, **ids(*layers)), target, True, "", prompts)
    assert head.boundaries == RIGHT
    assert "ids=" in caplog.text
    assert "original=2,3,3:" in caplog.text


def test_layers_of_the_setting_win(target: Decoder, tensors: dict[str, Tensor]) -> None:
    assert load_draft(image(tensors), target, True, "0,6,final", no_prompts).boundaries == (0, 6, FINAL)
    with pytest.raises(ConfigError, match="--draft-layers: expected 3 boundaries from 0 to 6"):
        load_draft(image(tensors), target, True, "1,3", no_prompts)


def test_head_of_another_model_is_refused(target: Decoder, tensors: dict[str, Tensor]) -> None:
    generator = torch.Generator().manual_seed(3)
    other = {name: torch.randn(each.shape, generator=generator).bfloat16() * 0.1 for name, each in tensors.items()}
    with pytest.raises(BadCheckpoint, match="draft head: agrees with the target on at most"):
        load_draft(image(other, **ids(0, 2, 4)), target, True, "", prompts)


def test_layer_of_the_targets_own_checkpoint_reads_final_states(tmp_path: Path) -> None:
    tiny = make_family("deepseek", tmp_path)
    config = tiny.config
    own = as_stored(make_oracle(tiny), config.num_layers)
    found = read_draft_image("{}", own, "beef", config)
    target = Decoder(with_draft(config, found.layer), tiny.weights, torch.float32, CPU)
    head = load_draft(found, target, False, "", no_prompts)
    assert isinstance(head, MtpLayer)
    assert (head.boundaries, head.place) == ((FINAL,), draft_place(target.config))


def test_hash_names_target_head_and_boundaries() -> None:
    usual = drafted_hash("cafe", "beef", RIGHT)
    assert usual == drafted_hash("cafe", "beef", RIGHT)
    others = [
        drafted_hash("cafe", "beef", (2, 3, 5)),
        drafted_hash("cafe", "feed", RIGHT),
        drafted_hash("feed", "beef", RIGHT),
    ]
    assert len({usual, "cafe", *others}) == 5


def model_with(directory: Path, template: Any) -> Path:
    """weft-nano's tokenizer with another chat template."""
    settings = json.loads((NANO / "tokenizer_config.json").read_text())
    (directory / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": template}))
    (directory / "tokenizer.json").symlink_to(NANO / "tokenizer.json")
    return directory


CHAT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
NAMED = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "[{{ messages[0].content }}]"}]
TEMPLATES = {"named": (NAMED, "[{}]"), "none": (None, "{}"), "fault": ("{{ raise_exception('no') }}", "{}")}


@pytest.mark.parametrize("name", ["own", *TEMPLATES])
def test_scoring_prompts_are_chats_if_the_template_renders(name: str, tmp_path: Path) -> None:
    template, form = TEMPLATES.get(name, ("", CHAT))
    model = NANO if name == "own" else model_with(tmp_path, template)
    tokenizer = Tokenizer.from_file(str(NANO / "tokenizer.json"))
    found = [tokenizer.decode(each, skip_special_tokens=False) for each in scoring_prompts(model)]
    assert found == [form.format(question) for question in QUESTIONS]


def test_scoring_prompt_needs_a_tokenizer() -> None:
    with pytest.raises(BadCheckpoint, match=r"WEFT_MODEL: a tokenizer is needed .*WEFT_DRAFT_LAYERS"):
        scoring_prompts(None)
