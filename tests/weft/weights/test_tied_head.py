"""What a checkpoint holds counts, not what its config.json says of its output matrix: as for transformers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.weft.model.test_families import NUM_TOKENS, TOKENS, logits_in_chunks
from tests.weft.tiny_families import TinyFamily, make_family, wrap
from tests.weft.weights.checkpoints import nothing
from weft.errors import BadCheckpoint, StorageUnavailable
from weft.model.config import read_config
from weft.weights import tied_head as head_module
from weft.weights.checkpoint import Checkpoint, read_checkpoint
from weft.weights.image import write_image
from weft.weights.image_tensors import open_image
from weft.weights.tied_head import resolve_tied_head
from weft_bundle import convert

pytestmark = pytest.mark.usefixtures("shared_memory")
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@pytest.fixture
def tied(tmp_path: Path) -> TinyFamily:
    """Its config.json says so, and its file has no other output matrix."""
    return make_family("qwen3", tmp_path / "model")


def add_head(directory: Path, change: float, prefix: str = "") -> None:
    """Beside the embedding, from which one of the last numbers differs by `change`."""
    tensors = load_file(directory / "model.safetensors")
    head = tensors[prefix + EMBEDDING].clone()
    head[-1, -1] += change
    save_file({**tensors, prefix + HEAD: head}, directory / "model.safetensors", metadata={"format": "pt"})


def names(checkpoint: Checkpoint) -> set[str]:
    return {tensor.entry.name for tensor in checkpoint.tensors}


def test_a_head_of_its_own_is_used_as_by_transformers(tied: TinyFamily, tmp_path: Path) -> None:
    add_head(tied.directory, change=3.0)
    oracle = AutoModelForCausalLM.from_pretrained(tied.directory)
    checkpoint = resolve_tied_head(read_checkpoint(tied.directory), 2)
    image = write_image(checkpoint, lambda size, file: None, 2)
    try:
        (tmp_path / "served").mkdir()
        (tmp_path / "served/config.json").write_text(checkpoint.config_json)
        served = TinyFamily(oracle, tied.directory, read_config(tmp_path / "served"))
        ours = logits_in_chunks(served, NUM_TOKENS)
        torch.testing.assert_close(ours, served.logits(TOKENS), rtol=1e-4, atol=1e-4 * float(ours.std()))
        assert not torch.allclose(ours, tied.logits(TOKENS), rtol=1e-3, atol=1e-3), "the head makes no difference here"
        assert torch.equal(
            open_image(image.name, image.size_bytes)[HEAD], load_file(tied.directory / "model.safetensors")[HEAD]
        )
        assert resolve_tied_head(read_checkpoint(tied.directory), 2).source_id == checkpoint.source_id
    finally:
        image.release()


def test_the_embedding_again_takes_no_memory(tied: TinyFamily) -> None:
    plain = read_checkpoint(tied.directory)
    assert resolve_tied_head(plain, 2) is plain
    add_head(tied.directory, change=0.0)
    checkpoint = resolve_tied_head(read_checkpoint(tied.directory), 2)
    assert names(checkpoint) == names(plain)
    assert json.loads(checkpoint.config_json)["tie_word_embeddings"] is True


def test_a_head_in_a_file_of_its_own_is_looked_at_again_when_that_file_was_written_anew(tied: TinyFamily) -> None:
    """Else the image of the days when it was the embedding again would be found, and served."""
    one, other = (f"model-0000{number}-of-00002.safetensors" for number in (1, 2))
    tensors = load_file(tied.directory / "model.safetensors")
    weight_map = {**dict.fromkeys(tensors, one), HEAD: other}
    (tied.directory / "model.safetensors").rename(tied.directory / one)
    (tied.directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    save_file({HEAD: tensors[EMBEDDING].clone()}, tied.directory / other)
    same = resolve_tied_head(read_checkpoint(tied.directory), 2)
    assert HEAD not in names(same)
    image = write_image(same, lambda size, file: None, 2)
    save_file({HEAD: tensors[EMBEDDING] + 1}, tied.directory / other)
    assert HEAD in names(resolve_tied_head(read_checkpoint(tied.directory), 2))
    with pytest.raises(StorageUnavailable, match="changed while they were read"):
        write_image(same, lambda size, file: None, 2)
    image.release()


def test_a_wrapped_model_and_a_bundle_have_theirs_too(tied: TinyFamily, tmp_path: Path) -> None:
    wrapped = wrap(make_family("llama4", tmp_path / "text"), "Llama4ForConditionalGeneration", tmp_path / "wrapped")
    path = wrapped.directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tie_word_embeddings": True}))
    fields = json.loads(path.read_text())
    del fields["text_config"]["tie_word_embeddings"]
    path.write_text(json.dumps(fields))
    add_head(wrapped.directory, change=1.0, prefix="language_model.")
    add_head(tied.directory, change=1.0)
    convert.compress(tied.directory, tmp_path / "bundle", 2, nothing)
    for directory in (wrapped.directory, tmp_path / "bundle"):
        assert read_config(directory).is_tied
        checkpoint = resolve_tied_head(read_checkpoint(directory), 2)
        assert any(name.endswith(HEAD) for name in names(checkpoint))
        (tmp_path / "config.json").write_text(checkpoint.config_json)
        assert not read_config(tmp_path).is_tied


def test_who_finds_an_image_reads_no_matrices(tied: TinyFamily, monkeypatch: pytest.MonkeyPatch) -> None:
    add_head(tied.directory, change=0.0)
    checkpoint = resolve_tied_head(read_checkpoint(tied.directory), 2)
    image = write_image(checkpoint, lambda size, file: None, 2)
    monkeypatch.setattr(head_module, "files_reader", None)
    try:
        assert resolve_tied_head(read_checkpoint(tied.directory), 2).source_id == checkpoint.source_id
    finally:
        image.release()


def test_a_head_that_fits_no_vocabulary_is_refused(tied: TinyFamily) -> None:
    tensors = load_file(tied.directory / "model.safetensors")
    tensors[HEAD] = tensors[EMBEDDING][:-1].clone()
    save_file(tensors, tied.directory / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(BadCheckpoint, match=r"model\.safetensors: tensor lm_head\.weight"):
        resolve_tied_head(read_checkpoint(tied.directory), 2)
