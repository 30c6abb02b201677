"""Which draft model goes with a model, and what its image is read from."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.weft.model.test_mtp import as_stored, make_oracle
from tests.weft.tiny_families import make_family
from weft.config import shipped_model
from weft.errors import BadCheckpoint
from weft.model.config import read_config
from weft.model.draft_config import DraftConfig
from weft.model.mtp_config import MtpConfig, planned_mtp
from weft.weights.checkpoint import read_checkpoint
from weft.weights.draft_checkpoint import draft_directory, read_draft, read_mtp
from weft.weights.image import image_name

NANO = shipped_model() or Path()


@pytest.fixture
def deepseek(tmp_path: Path) -> Path:
    """A checkpoint with a layer that drafts."""
    directory = tmp_path / "deepseek"
    tiny = make_family("deepseek", directory)
    fields = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**fields, "num_nextn_predict_layers": 1}))
    own = as_stored(make_oracle(tiny), tiny.config.num_layers)
    path = directory / "model.safetensors"
    save_file({name: each.clone() for name, each in (load_file(path) | own).items()}, path)
    return directory


def test_setting_chooses_the_draft_model(tmp_path: Path) -> None:
    assert draft_directory("auto", NANO) == NANO / "draft"
    assert draft_directory("auto", tmp_path) is None
    assert draft_directory("mtp", NANO) == NANO
    assert draft_directory(str(tmp_path), NANO) == tmp_path
    assert draft_directory("ngram", NANO) is draft_directory("none", NANO) is None


def test_head_beside_a_model_is_read_for_it() -> None:
    source = read_draft("auto", NANO)
    assert source is not None
    assert isinstance(source.config, DraftConfig)
    assert (source.num_features, source.config.boundaries) == (3, (1, 3, 5))
    assert source.checkpoint.total_bytes == sum(
        each.nbytes for each in load_file(NANO / "draft/model.safetensors").values()
    )


def test_wrong_head_is_named_by_its_file(tmp_path: Path) -> None:
    with pytest.raises(BadCheckpoint, match=rf"^{tmp_path}/config.json: no such file; name the directory of a draft"):
        read_draft(str(tmp_path), NANO)
    with pytest.raises(BadCheckpoint, match=r"weft-nano/config.json: architectures: 'LlamaForCausalLM' is no EAGLE-3"):
        read_draft(str(NANO), NANO)


def test_drafting_layer_is_an_image_of_its_own(deepseek: Path) -> None:
    source, target = read_mtp(deepseek), read_checkpoint(deepseek)
    assert isinstance(source.config, MtpConfig)
    names = {each.entry.name for each in source.checkpoint.tensors}
    assert names
    assert all(name.startswith("model.layers.3.") for name in names)
    assert "model.layers.3.embed_tokens.weight" not in names
    assert not names & {each.entry.name for each in target.tensors}
    # Images of other states of a directory's files are removed, so both need IDs of their own.
    assert source.checkpoint.directory_id != target.directory_id
    assert image_name(source.checkpoint) != image_name(target)


def test_drafting_layer_is_planned_from_the_config_alone(deepseek: Path) -> None:
    assert planned_mtp(read_config(deepseek)).layer == read_mtp(deepseek).config.layer
    with pytest.raises(BadCheckpoint, match="the checkpoint has no layer that drafts"):
        planned_mtp(read_config(NANO))


def test_model_without_a_drafting_layer_is_refused() -> None:
    with pytest.raises(
        BadCheckpoint, match=r"weft-nano: tensor model.layers.6.eh_proj.weight is missing: the checkpoint"
    ):
        read_mtp(NANO)


def test_incomplete_drafting_layer_is_refused(deepseek: Path, tmp_path: Path) -> None:
    shutil.copytree(deepseek, other := tmp_path / "other")
    tensors = load_file(other / "model.safetensors")
    del tensors["model.layers.3.hnorm.weight"]
    save_file(tensors, other / "model.safetensors")
    with pytest.raises(BadCheckpoint, match=r"other: tensor model.layers.3.hnorm.weight is missing"):
        read_mtp(other)
