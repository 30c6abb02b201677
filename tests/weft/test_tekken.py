"""tekken.json gives the tokens of Mistral's own library, which also ships the file that these tests read."""

from __future__ import annotations

import json
import shutil
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mistral_common.tokens.tokenizers.base import SpecialTokenPolicy, SpecialTokens
from mistral_common.tokens.tokenizers.tekken import Tekkenizer
from tokenizers import Tokenizer

from tests.weft.tiny_tekken import tiny_tekken
from weft.cli.doctor import Severity, Subject, model
from weft.errors import BadCheckpoint
from weft.grammar import load_grammars
from weft.hub_cache import small_files
from weft.model.config import read_config
from weft.tokenizer import EndToken, check_tokenizer, read_end_token, read_special_tokens, read_tokenizer
from weft_services.gateway.generation import Conversation
from weft_services.gateway.model import load_model
from weft_services.gateway.text.codec import Codec

ROOT = Path(__file__).parents[2]
SHIPPED = ROOT / "models" / "weft-nano"
PUBLISHED = Path(str(files("mistral_common"))) / "data" / "tekken_240911.json"
NUM_SPECIAL, NUM_IDS = 1000, 131_072
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]"
    "{% else %}{{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
TEXTS = [
    *("", " ", "a", "Hello", "Hello world", " leading", "trailing ", "  two  blanks  ", "\n", "\n\n \n", "\t\tx"),
    *(
        "don't",
        "I'LL we've",
        "HTTPServer",
        "camelCaseName",
        "snake_case_name",
        "ÄÖÜ straße",
        "naïve café",
        "ﬁne ligature",
    ),
    *("123456789", "3.14159", "1,000,000", "x=1;y=2", "a/b/c\r\n", "https://example.org/a?b=c#d", "C:\\dir\\file"),
    *("你好,世界", "床前明月光", "こんにちは", "안녕하세요", "Привет, мир", "שלום עולם", "مرحبا بالعالم", "नमस्ते दुनिया"),
    *(
        "สวัสดีชาวโลก",
        "Γειά μας",
        "Ελληνικά ΚΕΦΑΛΑΙΑ",
        "🙂",
        "👩‍👩‍👧‍👦 family",
        "🇫🇷🇩🇪",
        "e\u0301 combining",
        "\u200bzero\u2003width",
    ),
    *("def f(x):\n    return x + 1\n", '{"a": [1, 2, {"b": null}]}', "<html><body>", "<|im_end|>", "[inst] [ INST ]"),
    *(
        "\x00\x01\x7f",
        "\u0085next\u180eline",
        "\U0001f9ff\U00020000",
        "ǅ titlecase ǅungla",
        "!!!???...",
        "aaaaaaaaaaaaaaaaaaaaaa",
    ),
]
PIECES = [
    *"aAzZéßЖжñ中文ǅ9042 \n\r\t.,!?'\"-_(){}=/#🙂",
    "I'LL",
    " the",
    "\r\n",
    "  ",
    "123456",
    "HTTPServer",
    "\u0301",
]


def with_special_tokens() -> dict[str, Any]:
    """Return the published file; its version of 2024 relies on a list in the library, which newer files contain."""
    values: dict[str, Any] = json.loads(PUBLISHED.read_text())
    special = [
        dict(token, token_str=SpecialTokens(token["token_str"]).value) for token in Tekkenizer.DEPRECATED_SPECIAL_TOKENS
    ]
    return {**values, "special_tokens": [*special, {"rank": 20, "token_str": "[THINK]", "is_control": False}]}


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("mistral")
    (directory / "tekken.json").write_text(json.dumps(with_special_tokens()))
    config = json.loads((SHIPPED / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "vocab_size": NUM_IDS, "eos_token_id": None}))
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return directory


@pytest.fixture(scope="module")
def oracle(published: Path) -> Tekkenizer:
    return Tekkenizer.from_file(published / "tekken.json")


@pytest.fixture(scope="module")
def converted(published: Path) -> Tokenizer:
    return Tokenizer.from_buffer(read_tokenizer(published))


def test_tekken_has_ids_of_its_library(converted: Tokenizer, oracle: Tekkenizer) -> None:
    pages = [(ROOT / name).read_text() for name in ("README.md", "docs/reference/api.md", "libs/weft/hub.py")]
    assert len(TEXTS) >= 50
    for text in (*TEXTS, *pages):
        expected = oracle.encode(text, bos=False, eos=False)
        assert converted.encode(text, add_special_tokens=False).ids == expected, text
        assert converted.encode(text).ids == oracle.encode(text, bos=True, eos=False)
        assert converted.decode(expected) == text


@given(text=st.one_of(st.text(max_size=60), st.lists(st.sampled_from(PIECES), max_size=40).map("".join)))
@settings(max_examples=300, deadline=None)
def test_tekken_has_library_ids_for_any_text(text: str, converted: Tokenizer, oracle: Tekkenizer) -> None:
    assert converted.encode(text, add_special_tokens=False).ids == oracle.encode(text, bos=False, eos=False)


def test_tekken_has_the_bytes_of_every_id(converted: Tokenizer, oracle: Tekkenizer) -> None:
    codec = Codec(converted)
    assert converted.get_vocab_size() == oracle.n_words == NUM_IDS
    keep = SpecialTokenPolicy.KEEP
    for number in range(NUM_IDS):
        assert codec.token_bytes(number) == oracle.id_to_byte_piece(number, keep)


def test_tekken_streams_what_decode_returns(converted: Tokenizer, oracle: Tekkenizer) -> None:
    codec = Codec(converted)
    for text in TEXTS:
        ids = [oracle.bos_id, *oracle.encode(text, bos=False, eos=False), 20, oracle.eos_id]
        stream = codec.detokenizer()
        streamed = "".join(stream.push([number]) for number in ids) + stream.flush()
        assert streamed == codec.decode(ids) == oracle.decode(ids, SpecialTokenPolicy.IGNORE) == text


def test_tekken_parses_special_tokens_in_chats(converted: Tokenizer, oracle: Tekkenizer) -> None:
    ids = converted.encode("<s>[INST]Hi[/INST][TOOL_CALLS]x</s><SPECIAL_21>[THINK]", add_special_tokens=False).ids
    words = [oracle.encode(text, bos=False, eos=False) for text in ("Hi", "x")]
    assert ids == [1, 3, *words[0], 4, 9, *words[1], 2, 21, 20]
    assert sorted(converted.get_added_tokens_decoder()) == list(range(NUM_SPECIAL))


def test_tekken_serves_a_chat(published: Path, oracle: Tekkenizer) -> None:
    served = load_model(published, "mistral", escapes_special_tokens=True)
    assert served.template is not None
    question = Conversation(({"role": "user", "content": "Say [INST] or </s>"},))
    ids = served.written.encode(served.template.render(question), add_special_tokens=False)
    assert list(ids) == [1, 3, *oracle.encode("Say [INST] or </s>", bos=False, eos=False), 4]


def test_tekken_names_its_end_token(published: Path) -> None:
    assert read_special_tokens(published) == {"bos_token": "<s>", "eos_token": "</s>"}
    assert read_end_token(published) == EndToken("</s>", (2,))
    assert read_config(published).eos_token_ids == (2,)


def test_tekken_compiles_grammars(published: Path) -> None:
    grammars = load_grammars(published, NUM_IDS, [2])
    assert grammars is not None
    assert grammars.tokenizer_hash == load_grammars(published, NUM_IDS, [2]).tokenizer_hash


def test_doctor_accepts_tekken(tmp_path: Path) -> None:
    shutil.copytree(SHIPPED, tmp_path / "nano")
    (tmp_path / "nano" / "tokenizer.json").unlink()
    for values, is_refused in ((tiny_tekken(), False), ({}, True)):
        (tmp_path / "nano" / "tekken.json").write_text(json.dumps(values))
        found = list(model.check_model(Subject({"nano": tmp_path / "nano"})))
        failures = [each.says for each in found if each.level == Severity.FAILURE]
        assert bool(failures) == is_refused
        assert all("tekken.json: config: expected an object" in says for says in failures)


def test_tokenizer_json_wins_over_tekken(tmp_path: Path) -> None:
    (tmp_path / "tekken.json").write_text("damaged")
    (tmp_path / "tokenizer.json").write_text('{"model": {}}')
    check_tokenizer(tmp_path)
    assert read_tokenizer(tmp_path) == b'{"model": {}}'
    assert read_end_token(tmp_path) is None
    assert small_files({"tokenizer.json", "tekken.json"}) == ["tokenizer.json"]
    assert small_files({"config.json", "tekken.json", "x"}) == ["config.json", "tekken.json"]


def test_tekken_cuts_the_vocabulary(tmp_path: Path) -> None:
    (tmp_path / "tekken.json").write_text(json.dumps(tiny_tekken()))
    tokenizer = Tokenizer.from_buffer(read_tokenizer(tmp_path))
    assert tokenizer.encode("abcd", add_special_tokens=False).ids == [4 + 256, 4 + 257]
    assert tokenizer.id_to_token(3) == "<SPECIAL_3>"
    assert tokenizer.get_vocab_size() == 262


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"config": None}, "config: expected an object"),
        ({"config": {"pattern": 3}}, r"config\.pattern: expected text"),
        ({"vocab": {}}, "vocab: expected a list"),
        ({"vocab": tiny_tekken()["vocab"][:257]}, "vocab: has 257 tokens; config asks for 258"),
        ({"vocab": tiny_tekken()["vocab"][1:]}, r"vocab\[0\]: expected rank 0"),
        ({"vocab": [{"rank": 0, "token_bytes": "?"}, *tiny_tekken()["vocab"][1:]]}, r"vocab\[0\]"),
        ({"vocab": [*tiny_tekken()["vocab"][:257], {"rank": 257, "token_bytes": "YWI="}, 1]}, r"vocab\[257\]"),
        ({"special_tokens": None}, "special_tokens: the list is missing, as in files of 2024"),
        ({"special_tokens": [3]}, r"special_tokens\[0\]: expected rank 0"),
        ({"special_tokens": tiny_tekken()["special_tokens"] * 2}, "special_tokens: expected at most 4, found 6"),
        ({"special_tokens": [{"rank": at, "token_str": "<s>"} for at in (0, 1)]}, "occurs twice"),
        ({"special_tokens": tiny_tekken()["special_tokens"][:2]}, "special_tokens: expected also </s>"),
        (
            {"special_tokens": [*tiny_tekken()["special_tokens"], {"rank": 3, "token_str": "ab"}]},
            "in the vocabulary too",
        ),
    ],
)
def test_damaged_tekken_is_refused(tmp_path: Path, change: dict[str, Any], reason: str) -> None:
    (tmp_path / "tekken.json").write_text(json.dumps({**tiny_tekken(), **change}))
    with pytest.raises(BadCheckpoint, match=rf"tekken\.json.*{reason}"):
        read_tokenizer(tmp_path)


def test_truncated_tekken_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tekken.json").write_text(json.dumps(tiny_tekken())[:-100])
    for read in (check_tokenizer, read_tokenizer, read_end_token):
        with pytest.raises(BadCheckpoint, match=r"tekken\.json: not readable as JSON"):
            read(tmp_path)
