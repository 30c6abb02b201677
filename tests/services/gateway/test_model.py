"""What the gateway reads of a checkpoint: generation defaults, good and bad, and what its tokens are."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from tests.services.gateway.conftest import MODEL_NAME, SIZES
from weft.errors import BadCheckpoint
from weft_services.gateway.dialects.openai_requests import parse_chat, parse_completion
from weft_services.gateway.generation import Conversation, SamplingDefaults
from weft_services.gateway.mesh.prepare import prepare
from weft_services.gateway.model import load_model
from weft_services.gateway.text.chat_template import ChatTemplate
from weft_services.gateway.text.codec import MAX_WINDOW, Codec


def defaults(model_dir: Path, tmp_path: Path, **settings: Any) -> SamplingDefaults:
    """As read from a generation_config.json with these settings."""
    directory = tmp_path / MODEL_NAME
    shutil.copytree(model_dir, directory, dirs_exist_ok=True)
    (directory / "generation_config.json").write_text(json.dumps(settings))
    return load_model(directory, MODEL_NAME).defaults


def test_generation_defaults_are_the_models_own(model_dir: Path, tmp_path: Path) -> None:
    assert defaults(model_dir, tmp_path, temperature=1, top_k=50, top_p=None) == SamplingDefaults(1.0, 1.0, 50, 0.0)
    assert defaults(model_dir, tmp_path, do_sample=False, temperature=0.7).temperature == 0.0
    greedy = defaults(model_dir, tmp_path, do_sample=False, temperature=0.7, top_p="all", repetition_penalty=1.1)
    assert greedy == SamplingDefaults(0.0, repetition_penalty=1.1)
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


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        (
            "config.json",
            '{"architectures": ["Llama4ForConditionalGeneration"], "text_config": "abc"}',
            "text_config: expected an object",
        ),
        ("generation_config.json", "[" * 100_000, "not readable as JSON"),
    ],
)
def test_small_files_that_hold_nonsense_are_refused_by_name(
    model_dir: Path, tmp_path: Path, name: str, content: str, said: str
) -> None:
    shutil.copytree(model_dir, tmp_path / "model")
    (tmp_path / "model" / name).write_text(content)
    with pytest.raises(BadCheckpoint, match=rf"{name}: {said}"):
        load_model(tmp_path / "model", MODEL_NAME)


def test_a_template_that_is_no_text_is_refused_by_name(model_dir: Path, tmp_path: Path) -> None:
    shutil.copytree(model_dir, tmp_path / "model")
    (path := tmp_path / "model" / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(BadCheckpoint, match=r"chat_template\.jinja: not readable as text: "):
        load_model(tmp_path / "model", MODEL_NAME)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(BadCheckpoint, match=r"chat_template\.jinja: not readable: not a regular file"):
        load_model(tmp_path / "model", MODEL_NAME)


def test_a_template_reads_variables_of_its_own_and_keeps_those_of_the_gateway() -> None:
    template = ChatTemplate("{{ mood }}{{ bos_token }}{{ effort is defined }}", {"bos_token": "<s>"})
    conversation = Conversation(({"role": "user", "content": "x"},), kwargs={"mood": "calm", "bos_token": "no"})
    assert template.render(conversation) == "calm<s>False"


def test_a_template_gets_every_special_token_that_the_tokenizer_has(model_dir: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(model_dir, tmp_path / "copy"))
    tokens = {name: f"<{name}>" for name in PreTrainedTokenizerBase.SPECIAL_TOKENS_ATTRIBUTES}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokens))
    (folder / "chat_template.jinja").write_text("".join(f"{{{{ {name} }}}}" for name in tokens))
    template = load_model(folder, "m").template
    assert template is not None
    assert template.render(Conversation(({"role": "user", "content": "x"},))) == "".join(tokens.values())


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


def spaced_codec() -> Codec:
    """Of a vocabulary with spaces in its words, as those of Llama 2 and the first Mistrals."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "H", "i", "▁H", "▁Hi", "Hi"]
    merges = [("▁", "H"), ("▁H", "i"), ("H", "i")]
    numbers = {piece: number for number, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(numbers, merges, unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return Codec(tokenizer)


def test_tokens_of_a_vocabulary_with_spaces_in_its_words_are_shown_as_they_stand_in_a_text() -> None:
    codec = spaced_codec()
    ids = codec.encode("Hi Hi éHi", add_special_tokens=False)
    assert [codec.token_text(each) for each in ids] == [" Hi", " Hi", " ", "\ufffd", "\ufffd", "Hi"]
    assert b"".join(map(codec.token_bytes, ids)).decode() == " Hi Hi éHi"


@pytest.mark.parametrize("num_before", [1, 2, 3, 4, 5])
def test_what_goes_on_with_a_text_keeps_its_first_space(num_before: int) -> None:
    """Cut anywhere, also within a character: what was before and what comes then are the text."""
    codec = spaced_codec()
    ids = codec.encode("Hi Hi éHi", add_special_tokens=False)
    before, behind = ids[:num_before], ids[num_before:]
    detokenizer = codec.detokenizer(before)
    text = "".join(detokenizer.push((each,)) for each in behind) + detokenizer.flush()
    assert codec.decode(before).rstrip("\ufffd") + text == codec.decode(ids)
    assert codec.detokenizer().push(behind) != text or not text.startswith(" ")


@pytest.mark.parametrize("size", [1, 2, 3, 5, 99])
@pytest.mark.parametrize("text", ["Hi 🙂🙂中é Hi", "中文字", "é Hié", "HiéHi é", " Hi", "   Hi"])
def test_characters_that_are_spelled_byte_by_byte_follow_one_another(text: str, size: int) -> None:
    codec = spaced_codec()
    ids = codec.encode(text, add_special_tokens=False)
    detokenizer = codec.detokenizer()
    pieces = [detokenizer.push(ids[start : start + size]) for start in range(0, len(ids), size)]
    assert "".join(pieces) + detokenizer.flush() == codec.decode(ids) == text


def test_broken_bytes_cost_their_own_character_and_no_more_work_than_others() -> None:
    codec, decoded = spaced_codec(), [0]
    decode = codec.decode

    def watched(token_ids: Sequence[int]) -> str:
        decoded.append(len(token_ids))
        return decode(token_ids)

    codec.decode = watched  # type: ignore[method-assign]
    detokenizer = codec.detokenizer()
    byte, word = 1, codec.encode("Hi", add_special_tokens=False)[0]  # a byte's number is one more than it
    ids = [word, byte + 0xFF, *[byte + 0x41] * 200, byte + 0xE4, word]
    assert "".join(detokenizer.push((each,)) for each in ids) == "Hi\ufffd" + "A" * 200 + "\ufffd Hi"
    assert max(decoded) <= MAX_WINDOW


def test_a_texts_continuation_is_decoded_behind_it_and_an_answer_by_itself(model_dir: Path) -> None:
    model = load_model(model_dir, "m")
    for body, length in (
        ({"prompt": "the answer is here and there, hello world and more of it"}, 8),
        ({"prompt": [5]}, 1),
    ):
        (prompt,) = prepare(parse_completion(json.dumps({"model": "m", **body}).encode()), model, None, 512).prompts
        assert prompt.context == prompt.token_ids[-length:]
    chat = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
    assert prepare(parse_chat(json.dumps(chat).encode()), model, None, 512).prompts[0].context == ()


@pytest.mark.parametrize("is_saved_apart", [False, True])
def test_conversations_with_tools_have_a_template_of_their_own(
    model_dir: Path, tmp_path: Path, is_saved_apart: bool
) -> None:
    """As Hermes 2 and 3 are published, and as transformers saves them again."""
    folder = Path(shutil.copytree(model_dir, tmp_path / "copy"))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "chat_template.jinja").unlink()
    calls = "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    tools = f"with {{{{ tools[0].function.name }}}}{{% for m in messages %}}{calls}{{% endfor %}}"
    if is_saved_apart:
        (folder / "chat_template.jinja").write_text("without")
        (folder / "additional_chat_templates").mkdir()
        (folder / "additional_chat_templates" / "tool_use.jinja").write_text(tools)
    else:
        named = [{"name": "default", "template": "without"}, {"name": "tool_use", "template": tools}]
        (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": named}))
    model = load_model(folder, "m")
    assert model.template is not None
    assert model.tool_format is not None
    assert model.tool_format.name == "hermes"
    tool = {"type": "function", "function": {"name": "now"}}
    user = {"role": "user", "content": "hi"}
    assert model.template.render(Conversation((user,), (tool,))) == "with now"
    assert model.template.render(Conversation((user,))) == "without"


def test_a_context_that_is_not_named_is_the_familys(model_dir: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(model_dir, tmp_path / "copy"))
    for family, positions in (("Llama", 2048), ("Qwen2", 32_768), ("Mistral", 131_072)):
        written = {**SIZES, "architectures": [f"{family}ForCausalLM"], "num_key_value_heads": 2}
        (folder / "config.json").write_text(json.dumps(written))
        assert load_model(folder, "m").max_context_tokens == positions
