"""Prompts that are tokenized piece by piece have the ids of the whole; what was said before is tokenized once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

from weft_services.gateway.dialects.openai_requests import parse_chat
from weft_services.gateway.generation import Conversation
from weft_services.gateway.mesh.prepare import prepare
from weft_services.gateway.model import load_model
from weft_services.gateway.text.codec import SegmentedEncoder, message_marks

NANO = Path(__file__).parents[3] / "models" / "weft-nano"
TEXT = ["<|im_start|>user\nthe answer is here, hello  world 12345 it's<|im_end|>\n"] * 4
LLAMA3_WORDS = r"(?i:'s|'t)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def trained(pre_tokenizer: Any, normalizer: Any = None, **kinds: Any) -> Tokenizer:
    """A small BPE with marks of messages. `kinds`: what is special about the end mark."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizer
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    marks = [
        AddedToken("<|im_start|>", normalized=False, special=True),
        AddedToken("<|im_end|>", special=True, **kinds),
    ]
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<unk>", *marks], show_progress=False)
    tokenizer.train_from_iterator(TEXT, trainer)
    tokenizer.add_tokens([AddedToken("<tool>", normalized=True, special=False)])
    return tokenizer


def split(words: str) -> Any:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(words), "isolated"), byte_level])


TOKENIZERS = {
    "nano": Tokenizer.from_file(str(NANO / "tokenizer.json")),
    "gpt": trained(pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "llama-3": trained(split(LLAMA3_WORDS), normalized=False),
    "first words": trained(pre_tokenizers.Metaspace(prepend_scheme="first"), normalized=False),
    "every piece": trained(pre_tokenizers.Metaspace(prepend_scheme="always")),
    "legacy": trained(
        pre_tokenizers.Sequence([]),
        normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁"), normalizers.NFKC()]),
        normalized=False,
    ),
    "white space": trained(split(LLAMA3_WORDS), lstrip=True, rstrip=True, normalized=False),
}
TEMPLATE = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n<tool>"
PIECES = st.lists(
    st.sampled_from(["<|im_start|>", "<|im_end|>", "<tool>", "<|im_", "start|>", "\n", " ", "  a", "it's", "12345"])
    | st.text(max_size=4),
    max_size=12,
)


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False).ids)


@pytest.mark.parametrize("name", TOKENIZERS)
@given(pieces=PIECES, later=PIECES)
def test_pieces_have_the_ids_of_the_whole(name: str, pieces: list[str], later: list[str]) -> None:
    tokenizer = TOKENIZERS[name]
    marks = message_marks(tokenizer, TEMPLATE)
    assert "<|im_start|>" in marks
    encoder = SegmentedEncoder(lambda text: ids_of(tokenizer, text), marks, min_chars=0)
    for text in ("".join(pieces), "".join(pieces + later), "".join(pieces)):
        assert encoder.encode(text, b"") == tuple(ids_of(tokenizer, text))


def test_no_text_is_cut_before_a_token_that_takes_from_its_left_or_that_others_reach_into() -> None:
    assert "<|im_end|>" not in message_marks(TOKENIZERS["white space"], TEMPLATE)
    assert "<tool>" not in message_marks(TOKENIZERS["llama-3"], TEMPLATE)
    nested = trained(pre_tokenizers.ByteLevel(), normalized=False)
    nested.add_special_tokens([AddedToken("x<|im_start|>", normalized=False), AddedToken("y<", normalized=False)])
    assert message_marks(nested, TEMPLATE) == []


@pytest.mark.parametrize(
    ("looking", "text"),
    [
        (AddedToken("<a>", single_word=True, normalized=False), "<a>END"),
        (AddedToken("END!", single_word=True, normalized=False), "aEND!"),
        (AddedToken("END!", lstrip=True, normalized=False), "a  END!"),
    ],
)
def test_no_text_is_cut_where_a_token_looks_at_the_other_side(looking: AddedToken, text: str) -> None:
    tokenizer = trained(pre_tokenizers.ByteLevel(), normalized=False)
    tokenizer.add_special_tokens([AddedToken("END", normalized=False), looking])
    encoder = SegmentedEncoder(lambda text: ids_of(tokenizer, text), message_marks(tokenizer, "END"), min_chars=0)
    assert encoder.encode(text, b"") == tuple(ids_of(tokenizer, text))


class Counting:
    """Counts what is tokenized."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def __call__(self, text: str) -> list[int]:
        self.texts.append(text)
        return ids_of(TOKENIZERS["nano"], text)


def test_a_turn_more_tokenizes_that_turn_and_tenants_share_nothing() -> None:
    counting = Counting()
    encoder = SegmentedEncoder(counting, ["<|im_start|>"], min_chars=0)
    turns = [f"<|im_start|>user\nquestion {place}<|im_end|>\n" for place in range(50)]
    encoder.encode("".join(turns), b"a")
    assert counting.texts == turns
    encoder.encode("".join([*turns, "<|im_start|>assistant\n"]), b"a")
    assert counting.texts[50:] == ["<|im_start|>assistant\n"]
    encoder.encode("".join(turns[:3]), b"b")
    assert counting.texts[51:] == turns[:3]


def test_what_is_kept_is_bounded_and_the_oldest_goes_first() -> None:
    counting = Counting()
    encoder = SegmentedEncoder(counting, ["<|im_start|>"], min_chars=0, max_bytes=2000)
    turns = [f"<|im_start|>user\nquestion {place}" for place in range(50)]
    encoder.encode("".join(turns), b"")
    counting.texts.clear()
    encoder.encode(turns[-1] + turns[0], b"")
    assert counting.texts == [turns[0]]


def test_a_long_chats_prompt_is_that_of_the_whole_text() -> None:
    model = load_model(NANO, "nano")
    messages = [
        {"role": ("user", "assistant")[place % 2], "content": f"{place}: " + "words " * 9} for place in range(101)
    ]
    asked = parse_chat(json.dumps({"model": "nano", "messages": messages, "max_tokens": 1}).encode())
    (conversation,) = asked.prompts
    assert isinstance(conversation, Conversation)
    assert model.template is not None
    for _ in range(2):
        (prompt,) = prepare(asked, model, 16, 10_000).prompts
        assert prompt.token_ids == model.codec.encode(model.template.render(conversation), add_special_tokens=False)
