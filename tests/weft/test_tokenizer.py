"""tokenizer.json made from tiktoken.model gives the tokens that tiktoken gives, by the published code's pattern."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
import tiktoken
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from weft.errors import BadCheckpoint
from weft.grammar import Grammars, load_grammars
from weft.tokenizer import NUM_RESERVED, PATTERN, byte_letters, read_tokenizer

ROOT = Path(__file__).parents[2]
HAN = "床前明月光 疑是地上霜 举头望明月 低头思故乡 机器学习模型在服务器上运行 "
NAMED = {0: "[BOS]", 1: "[EOS]", 2: "<|im_end|>", 22: "<think>", 23: "</think>"}
PIECES = [
    *"aAzZéßЖжñ中文月9042 \n\r\t.,!?'\"-_(){}=/#🙂",
    "I'LL",
    "don't",
    " the",
    "\r\n",
    "  ",
    "123456",
    "HTTPServer",
    "你好 world",
]


@pytest.fixture(scope="module")
def ranks() -> dict[bytes, int]:
    """Trained on what lies around here; merges beyond words' ends make runs of blanks and Han characters too."""
    texts = [(ROOT / name).read_text() for name in ("README.md", "docs/concepts.md", "docs/reference/api.md")]
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=2000, initial_alphabet=alphabet, show_progress=False)
    trained.train_from_iterator([*texts, *[HAN] * 20], trainer)
    letters = byte_letters()
    return {bytes(letters[each] for each in token): rank for token, rank in trained.get_vocab().items()}


@pytest.fixture(scope="module")
def published(ranks: dict[bytes, int], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As Kimi K2 is: ranks, and names for some of the special tokens."""
    directory = tmp_path_factory.mktemp("kimi")
    lines = [f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in ranks.items()]
    (directory / "tiktoken.model").write_text("".join(lines))
    names = {str(len(ranks) + at): {"content": name, "special": at < 22} for at, name in NAMED.items()}
    (directory / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": names}))
    return directory


@pytest.fixture(scope="module")
def oracle(ranks: dict[bytes, int]) -> tiktoken.Encoding:
    """As the published code makes it."""
    special = {NAMED.get(at, f"<|reserved_token_{len(ranks) + at}|>"): len(ranks) + at for at in range(NUM_RESERVED)}
    return tiktoken.Encoding("kimi", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens=special)


@pytest.fixture(scope="module")
def converted(published: Path) -> Any:
    return Tokenizer.from_buffer(read_tokenizer(published))


def test_whole_pages_have_the_tokens_of_tiktoken(converted: Any, oracle: tiktoken.Encoding) -> None:
    for name in (
        "docs/kv-transfer.md",
        "docs/reference/api.md",
        "libs/weft/tokenizer.py",
        "models/weft-nano/training.jsonl",
    ):
        text = HAN + (ROOT / name).read_text() + "<|im_end|>[EOS] <think>x</think>"
        tokens = oracle.encode(text, allowed_special="all")
        assert converted.encode(text).ids == tokens
        assert converted.decode(tokens, skip_special_tokens=False) == text


@given(text=st.lists(st.sampled_from([*PIECES, *NAMED.values()]), max_size=40).map("".join))
@settings(max_examples=300, deadline=None)
def test_any_text_has_the_tokens_of_tiktoken(text: str, converted: Any, oracle: tiktoken.Encoding) -> None:
    assert converted.encode(text).ids == oracle.encode(text, allowed_special="all")


def test_special_tokens_keep_their_ids_where_most_have_no_name(converted: Any, ranks: dict[bytes, int]) -> None:
    added = converted.get_added_tokens_decoder()
    assert sorted(added) == list(range(len(ranks), len(ranks) + NUM_RESERVED))
    assert {at: added[len(ranks) + at].content for at in NAMED} == NAMED
    assert added[len(ranks) + 5].content == f"<|reserved_token_{len(ranks) + 5}|>"
    assert [added[len(ranks) + at].special for at in (2, 5, 22)] == [True, True, False]


def test_grammars_are_compiled_for_it(published: Path, ranks: dict[bytes, int]) -> None:
    grammars = load_grammars(published, len(ranks) + NUM_RESERVED, [len(ranks) + 1])
    assert isinstance(grammars, Grammars)
    assert grammars.tokenizer_hash == load_grammars(published, len(ranks) + NUM_RESERVED, []).tokenizer_hash


def test_what_was_published_goes_before_what_could_be_made(published: Path, tmp_path: Path) -> None:
    for name in ("tiktoken.model", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((published / name).read_bytes())
    (tmp_path / "tokenizer.json").write_text("{}")
    assert read_tokenizer(tmp_path) == b"{}"


@pytest.mark.parametrize(
    ("content", "reason"),
    [("[" * 100_000, "JSON"), ('{"added_tokens_decoder": {"3000000": {}}}', "3000000 is too far"), ("[]", "list")],
)
def test_names_that_cannot_be_read_are_told_with_their_file(
    published: Path, tmp_path: Path, content: str, reason: str
) -> None:
    (tmp_path / "tiktoken.model").write_bytes((published / "tiktoken.model").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(content)
    with pytest.raises(BadCheckpoint, match=reason):
        read_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("content", "reason"),
    [(b"YQ== 0\nYg== 2\n", "ranks are not 0 to 1"), (b"? 0\n", "tiktoken.model"), (b"YQ==\n", "tiktoken.model")],
)
def test_ranks_that_cannot_be_read_are_told_with_their_file(tmp_path: Path, content: bytes, reason: str) -> None:
    (tmp_path / "tiktoken.model").write_bytes(content)
    with pytest.raises(BadCheckpoint, match=reason):
        read_tokenizer(tmp_path)
    (tmp_path / "tiktoken.model").unlink()
    with pytest.raises(BadCheckpoint, match=r"no tokenizer\.json, tekken\.json or tiktoken\.model"):
        read_tokenizer(tmp_path)
