"""What the gateway reads of a checkpoint: generation defaults, good and bad, and what its tokens are."""

from __future__ import annotations

import json
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers

from tests.services.gateway.conftest import MODEL_NAME
from weft.errors import BadCheckpoint
from weft_services.gateway.generation import Conversation, SamplingDefaults
from weft_services.gateway.model import Codec, load_model
from weft_services.gateway.text.chat_template import ChatTemplate


def defaults(model_dir: Path, tmp_path: Path, **settings: Any) -> SamplingDefaults:
    """As read from a generation_config.json with these settings."""
    directory = tmp_path / MODEL_NAME
    shutil.copytree(model_dir, directory, dirs_exist_ok=True)
    (directory / "generation_config.json").write_text(json.dumps(settings))
    return load_model(directory, MODEL_NAME).defaults


def test_generation_defaults_are_the_models_own(model_dir: Path, tmp_path: Path) -> None:
    assert defaults(model_dir, tmp_path, temperature=1, top_k=50, top_p=None) == SamplingDefaults(1.0, 1.0, 50, 0.0)
    assert defaults(model_dir, tmp_path, do_sample=False, temperature=0.7).temperature == 0.0
    # as some checkpoints and vLLM spell "no limit"
    assert defaults(model_dir, tmp_path, top_k=-1).top_k == 0


@pytest.mark.parametrize(
    ("field", "value"),
    [("temperature", "hot"), ("temperature", -1), ("top_k", 2.5), ("top_p", 0), ("top_p", 1.5), ("min_p", [0.1])],
)
def test_generation_defaults_that_no_request_could_use_are_refused_at_the_start(
    model_dir: Path, tmp_path: Path, field: str, value: Any
) -> None:
    with pytest.raises(BadCheckpoint, match=rf"generation_config\.json: {field}"):
        defaults(model_dir, tmp_path, **{field: value})


def test_a_template_reads_variables_of_its_own_and_keeps_those_of_the_gateway() -> None:
    template = ChatTemplate("{{ mood }}{{ bos_token }}{{ effort is defined }}", {"bos_token": "<s>"})
    conversation = Conversation(({"role": "user", "content": "x"},), kwargs={"mood": "calm", "bos_token": "no"})
    assert template.render(conversation) == "calm<s>False"


def test_encoding_a_long_text_leaves_the_interpreter_to_others(model_dir: Path) -> None:
    codec, done = load_model(model_dir, MODEL_NAME).codec, threading.Event()
    text = "the answer is here and there, hello world " * 30_000

    def encode() -> None:
        codec.encode(text, add_special_tokens=True)
        done.set()

    thread = threading.Thread(target=encode)
    thread.start()
    turns = 0
    while not done.wait(0.001):
        turns += 1
    thread.join()
    # `Tokenizer.encode`, which holds the interpreter's lock, allows about two
    assert turns > 10


def test_tokens_of_a_vocabulary_with_spaces_in_its_words_are_shown_as_they_stand_in_a_text() -> None:
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "H", "i", "▁H", "▁Hi", "Hi"]
    merges = [("▁", "H"), ("▁H", "i"), ("H", "i")]
    numbers = {piece: number for number, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(numbers, merges, unk_token="<unk>", byte_fallback=True))
    # as the tokenizers of Llama 2 and the first Mistrals have it
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    codec = Codec(tokenizer)
    ids = codec.encode("Hi Hi éHi", add_special_tokens=False)
    assert [codec.token_text(each) for each in ids] == [" Hi", " Hi", " ", "\ufffd", "\ufffd", "Hi"]
    assert b"".join(map(codec.token_bytes, ids)).decode() == " Hi Hi éHi"
