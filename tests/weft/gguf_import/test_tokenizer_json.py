"""Converted tokenizers split and join text as llama.cpp's rules and transformers' reading of the same file do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import AutoTokenizer
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

from tests.weft.tiny_gguf import MERGES, SPECIAL, add_byte_level, byte_tokens
from weft.errors import BadCheckpoint
from weft.gguf_import.gguf_file import open_gguf
from weft.gguf_import.tokenizer_json import DIGITS, GPT2, PATTERNS, end_tokens, tokenizer_files

TEXTS = (
    "12 1234 112 a1 a12",
    "the hens' he'Said it's 'S  ABAb aBa",
    "\n\n\n  \n 12\n\n!!/\n s!!!",
    "½²Ⅷ٣ 東京 12 straße",
    " he  he   12",
    "<|im_start|>user\n12<|im_end|>",
)
# GPT-2's published rule, which llama.cpp applies to what each single number leaves.
GPT2_RULE = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA_PIECES = ["▁", "h", "e", "l", "o", "1", "2", "▁h", "he", "ll", "▁he", "llo", "▁hello", "12", "▁1", "▁▁"]


def vocabulary_file(folder: Path, add_tokenizer: Any, **values: Any) -> Path:
    """Write a GGUF with a tokenizer and no tensors."""
    writer = gguf.GGUFWriter(path := folder / "m.gguf", "llama")
    add_tokenizer(writer)
    for key, value in values.items():
        writer.add_key_value(f"tokenizer.ggml.{key}", value, gguf.GGUFValueType.get_type(value))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def converted(path: Path) -> Tokenizer:
    return Tokenizer.from_str(json.dumps(tokenizer_files(open_gguf(path))["tokenizer.json"]))


def ids(tokenizer: Tokenizer, text: str) -> list[int]:
    found: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return found


def theirs(path: Path) -> Tokenizer:
    """transformers' reading of the file."""
    return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name).backend_tokenizer


@pytest.mark.parametrize("pre", [*(name for name in PATTERNS if name in GGUF_PRE_TOKENIZER_SPLITS), "gpt-2"])
def test_text_is_split_as_transformers_splits_it(tmp_path: Path, pre: str) -> None:
    path = vocabulary_file(tmp_path, lambda writer: add_byte_level(writer, pre))
    mine, other = converted(path), theirs(path)
    for text in TEXTS:
        assert ids(mine, text) == ids(other, text), text
        assert mine.decode(ids(mine, text), skip_special_tokens=False) == text


@pytest.mark.parametrize("pre", DIGITS)
def test_each_digit_stands_alone(tmp_path: Path, pre: str) -> None:
    """transformers reads these files without the rule for digits."""
    mine = converted(vocabulary_file(tmp_path, lambda writer: add_byte_level(writer, pre)))
    tokens = byte_tokens()
    reference = Tokenizer(
        BPE({token: i for i, token in enumerate(tokens)}, [(left, right) for left, right in map(str.split, MERGES)])
    )
    reference.add_special_tokens(list(SPECIAL))
    split = [pre_tokenizers.Split(Regex(rule), "isolated") for rule in (r"\p{N}", GPT2_RULE)]
    reference.pre_tokenizer = pre_tokenizers.Sequence([*split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    reference.decoder = decoders.ByteLevel()
    for text in TEXTS:
        assert ids(mine, text) == ids(reference, text), text
        assert mine.decode(ids(mine, text), skip_special_tokens=False) == text
    assert ids(mine, "1234") == [tokens.index(each) for each in "1234"]


def test_rules_differ_on_these_texts(tmp_path: Path) -> None:
    """Otherwise the tests above would not notice a rule that is missing."""
    rules = {
        name: converted(vocabulary_file(tmp_path, lambda writer, pre=name: add_byte_level(writer, pre)))
        for name in ("gpt-2", "smollm", "llama-bpe", "qwen2", "tekken", "gpt-4o")
    }
    found = {name: tuple(tuple(ids(each, text)) for text in TEXTS) for name, each in rules.items()}
    assert len(set(found.values())) == len(found)


def test_every_rule_has_one_meaning() -> None:
    assert not {*PATTERNS} & {*GPT2, *DIGITS}
    assert not {*GPT2} & {*DIGITS}


def add_sentencepiece(writer: Any) -> None:
    special, bytes_ = ["<unk>", "<s>", "</s>"], [f"<0x{number:02X}>" for number in range(256)]
    writer.add_tokenizer_model("llama")
    writer.add_token_list([*special, *bytes_, *LLAMA_PIECES])
    kinds = gguf.TokenType
    writer.add_token_types([kinds.UNKNOWN, kinds.CONTROL, kinds.CONTROL, *[kinds.BYTE] * 256, *[1] * len(LLAMA_PIECES)])
    writer.add_token_scores([0.0] * 259 + [-float(number) for number in range(len(LLAMA_PIECES))])
    for name, number in (("bos", 1), ("eos", 2), ("unk", 0)):
        getattr(writer, f"add_{name}_token_id")(number)


def test_sentencepiece_joins_as_transformers_does(tmp_path: Path) -> None:
    path = vocabulary_file(tmp_path, add_sentencepiece)
    mine, other = converted(path), theirs(path)
    for text in ("hello", "hello 12  hello", "hell\nß 東 he1"):
        assert ids(mine, text) == ids(other, text), text
    assert mine.encode("hello").ids == [1, 3 + 256 + LLAMA_PIECES.index("▁hello")]
    # Published tokenizers of Llama 2 and llama.cpp begin each text with a space, also behind a special token.
    assert mine.encode("</s>hello").tokens == ["<s>", "</s>", "▁hello"]
    assert mine.decode(ids(mine, "hello ß  12")) == "hello ß  12"


def test_sentencepiece_without_a_first_space(tmp_path: Path) -> None:
    mine = converted(vocabulary_file(tmp_path, add_sentencepiece, add_space_prefix=False, add_bos_token=False))
    assert mine.encode("hello").tokens == ["he", "llo"]
    assert mine.decode(ids(mine, " hello")) == " hello"


def test_first_token_follows_the_file(tmp_path: Path) -> None:
    def add(writer: Any) -> None:
        add_byte_level(writer, "llama-bpe")

    bos = byte_tokens().index("<|im_start|>")
    assert converted(vocabulary_file(tmp_path, add)).encode("x").ids[0] == bos
    assert converted(vocabulary_file(tmp_path, add, add_bos_token=False)).encode("x").ids[0] != bos


def test_end_tokens_are_those_of_the_file_and_of_chats(tmp_path: Path) -> None:
    tokens = byte_tokens()
    model = open_gguf(vocabulary_file(tmp_path, add_byte_level, eot_token_id=7))
    ends = [tokens.index("<|im_end|>"), 7, tokens.index("<|endoftext|>")]
    assert end_tokens(model.fields) == {"bos_token_id": tokens.index("<|im_start|>"), "eos_token_id": ends}


def test_broken_merges_are_refused(tmp_path: Path) -> None:
    def add(writer: Any, merge: str) -> None:
        add_byte_level(writer)
        writer.kv_data[0]["tokenizer.ggml.merges"].value[0] = merge

    with pytest.raises(BadCheckpoint, match=r"tokenizer.ggml.merges: expected two tokens, found '1 2 3'"):
        converted(vocabulary_file(tmp_path, lambda writer: add(writer, "1 2 3")))
    with pytest.raises(BadCheckpoint, match=r"tokenizer.ggml.tokens: no tokenizer can be made of these"):
        converted(vocabulary_file(tmp_path, lambda writer: add(writer, "zz z")))


def test_files_of_2023_without_a_rule_are_refused(tmp_path: Path) -> None:
    path = vocabulary_file(tmp_path, lambda writer: add_byte_level(writer, ""))
    with pytest.raises(BadCheckpoint, match=r"tokenizer.ggml.pre: is missing, as in files of 2023"):
        converted(path)
