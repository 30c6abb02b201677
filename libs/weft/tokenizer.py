"""Reads a checkpoint's tokenizer.json, or builds it from the file that the checkpoint has instead.

That is tekken.json in Mistral's own layout, and tiktoken.model for Kimi K2 and K2.5. The build is byte-for-byte
reproducible, so all services agree on its hash. No code of the model runs.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.errors import BadCheckpoint
from weft.file_io import path_exists, read_json_object, read_small, to_weft_error
from weft.tekken import TEKKEN, TEKKEN_NAMES, Tekken, read_tekken

TOKENIZER, RANKS, SETTINGS = "tokenizer.json", "tiktoken.model", "tokenizer_config.json"
SPECIAL_TOKENS_MAP = "special_tokens_map.json"
# The special tokens that transformers knows by name.
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# The published code of these models splits text into runs of Han characters, words without Han, up to three digits, ...
NO_HAN = "&&[^\\p{Han}]]"
FIRST, REST = (f"[\\p{{L{case}}}\\p{{Lm}}\\p{{Lo}}\\p{{M}}{NO_HAN}" for case in ("u}\\p{Lt", "l"))
ENDING = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
PATTERN = "|".join(
    (
        "[\\p{Han}]+",
        f"[^\\r\\n\\p{{L}}\\p{{N}}]?{FIRST}*{REST}+{ENDING}",
        f"[^\\r\\n\\p{{L}}\\p{{N}}]?{FIRST}+{REST}*{ENDING}",
        "\\p{N}{1,3}",
        " ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*",
        "\\s*[\\r\\n]+",
        "\\s+(?!\\S)",
        "\\s+",
    )
)
# Special tokens that follow the ranks; most have no name.
NUM_RESERVED = 256
MAX_ADDED = 100_000


def tokenizer_path(directory: Path) -> Path:
    """Return the file that defines the tokenizer; tokenizer.json wins. Raises BadCheckpoint, StorageUnavailable."""
    for name in (TOKENIZER, TEKKEN, RANKS):
        if path_exists(directory / name):
            return directory / name
    what = "copy the one that was published with the model beside its config.json"
    raise BadCheckpoint(f"{directory} has no {TOKENIZER}, {TEKKEN} or {RANKS}; {what}")


def read_tokenizer(directory: Path) -> bytes:
    """Return the content of tokenizer.json. Raises BadCheckpoint naming the file, or StorageUnavailable."""
    path = tokenizer_path(directory)
    try:
        if path.name == TOKENIZER:
            return read_small(path)
        if path.name == TEKKEN:
            return json.dumps(_converted_tekken(read_tekken(path))).encode()
        ranks = _read_ranks(path)
        settings = directory / SETTINGS
        named = read_json_object(settings).get("added_tokens_decoder", {}) if settings.is_file() else {}
        return json.dumps(_converted(ranks, {int(number): token for number, token in named.items()})).encode()
    except OSError as error:
        raise to_weft_error(error, f"{path}: not readable") from error
    except (ValueError, AttributeError) as error:
        raise BadCheckpoint(f"{directory}: {TOKENIZER} cannot be made from {path.name}: {error}") from error


@dataclass(frozen=True, slots=True)
class EndToken:
    """The tokenizer's `eos_token`: text and id. `ids` is empty if the vocabulary lacks it."""

    text: str
    ids: tuple[int, ...]


def read_special_tokens(directory: Path) -> dict[str, str]:
    """Return the text of each special token by its name, as in `eos_token`.

    As in transformers, tokenizer_config.json wins over special_tokens_map.json. With tekken.json, fixed names fill the
    gaps. Raises BadCheckpoint or StorageUnavailable.
    """
    found: dict[str, str] = {}
    for file in (SETTINGS, SPECIAL_TOKENS_MAP):
        values = _settings(directory / file)
        for name in SPECIAL_TOKENS:
            token = values.get(name)
            text = token.get("content") if isinstance(token, dict) else token
            if isinstance(text, str):
                found.setdefault(name, text)
    return TEKKEN_NAMES | found if _has_tekken(directory) else found


def read_end_token(directory: Path) -> EndToken | None:
    """Return the tokenizer's end token, or None if it names none. Raises BadCheckpoint or StorageUnavailable."""
    text = read_special_tokens(directory).get("eos_token")
    return EndToken(text, _ids_of(directory, text)) if text else None


def _ids_of(directory: Path, text: str) -> tuple[int, ...]:
    """Look in the short files first: tokenizer.json has up to 30 MB. Only tekken.json numbers its own tokens."""
    if _has_tekken(directory):
        special = read_tekken(directory / TEKKEN).special
        return (special.index(text),) if text in special else ()
    added = _settings(directory / SETTINGS).get("added_tokens_decoder")
    for number, token in added.items() if isinstance(added, dict) else ():
        if isinstance(token, dict) and token.get("content") == text and str(number).isdecimal():
            return (int(number),)
    tokenizer = _settings(directory / TOKENIZER)
    for token in tokenizer.get("added_tokens") or ():
        if isinstance(token, dict) and token.get("content") == text and type(token.get("id")) is int:
            return (token["id"],)
    model = tokenizer.get("model")
    return _id_in(model.get("vocab"), text) if isinstance(model, dict) else ()


def _id_in(vocabulary: Any, text: str) -> tuple[int, ...]:
    """Look up a token. BPE vocabularies map tokens to ids; Unigram vocabularies list tokens with scores."""
    if isinstance(vocabulary, list):
        vocabulary = {entry[0]: place for place, entry in enumerate(vocabulary) if isinstance(entry, list) and entry}
    number = vocabulary.get(text) if isinstance(vocabulary, dict) else None
    return (number,) if type(number) is int and number >= 0 else ()


def _has_tekken(directory: Path) -> bool:
    return not path_exists(directory / TOKENIZER) and path_exists(directory / TEKKEN)


def _settings(path: Path) -> dict[str, Any]:
    return read_json_object(path) if path_exists(path) else {}


def check_tokenizer(directory: Path) -> None:
    """Check that a tokenizer exists and is complete, without building one.

    Raises BadCheckpoint or StorageUnavailable.
    """
    path = tokenizer_path(directory)
    if path.name == TEKKEN:
        read_tekken(path)
    elif path.name == TOKENIZER and "model" not in read_json_object(path):
        raise BadCheckpoint(f"{path}: model is missing; fetch the file again")
    elif path.name == RANKS:
        try:
            read_small(path)
        except OSError as error:
            raise to_weft_error(error, f"{path}: not readable") from error


def byte_letters() -> dict[str, int]:
    """Map letters to bytes as byte-level vocabularies do: a printable letter for itself, else one from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in printable]
    letters = {chr(byte): byte for byte in printable}
    return letters | {chr(0x100 + position): byte for position, byte in enumerate(hidden)}


def _read_ranks(path: Path) -> dict[bytes, int]:
    """Parse lines of base64 token bytes and rank, which is the token's id."""
    pairs = (line.split() for line in read_small(path).splitlines() if line.strip())
    ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in pairs}
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise ValueError(f"{path.name}: ranks are not 0 to {len(ranks) - 1}, each once")
    return ranks


def _converted(ranks: Mapping[bytes, int], named: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    return {"added_tokens": _added(len(ranks), named), **_described(PATTERN, ranks, ())}


def _converted_tekken(tekken: Tekken) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    begin = TEKKEN_NAMES["bos_token"]
    # Mistral's decoder ignores the file's `is_control` and hides all of these ids.
    added = [{"id": at, "content": text, **flags, "special": True} for at, text in enumerate(tekken.special)]
    # A prompt without a template begins with <s>.
    whole = [{"SpecialToken": {"id": begin, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    begins = {
        "type": "TemplateProcessing",
        "single": whole,
        "pair": [*whole, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {begin: {"id": begin, "ids": [tekken.special.index(begin)], "tokens": [begin]}},
    }
    described = _described(tekken.pattern, tekken.ranks, tekken.special)
    return {"added_tokens": added, "post_processor": begins, **described}


def _described(pattern: str, ranks: Mapping[bytes, int], first: Sequence[str]) -> dict[str, Any]:
    """Return all but the added tokens. `first`: special tokens with the ids before the ranks.

    The vocabulary must have them, because the library gives other added tokens the ids after it.
    """
    letter_of = {byte: letter for letter, byte in byte_letters().items()}
    spelled = {token: "".join(letter_of[byte] for byte in token) for token in ranks}
    vocabulary = {text: number for number, text in enumerate(first)}
    vocabulary |= {spelled[token]: len(first) + rank for token, rank in ranks.items()}
    if len(vocabulary) < len(first) + len(ranks):
        raise ValueError("special_tokens: a special token is in the vocabulary too")
    model = {
        "type": "BPE",
        "vocab": vocabulary,
        "merges": [[spelled[part] for part in pair] for pair in _merges(ranks)],
        # A piece that is a token as a whole needs no merges.
        "ignore_merges": True,
    }
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    letters = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    return {
        "version": "1.0",
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, letters]},
        "decoder": letters,
        "model": model,
    }


def _merges(ranks: Mapping[bytes, int]) -> list[tuple[bytes, bytes]]:
    """Return every pair that forms a token, ordered by the token's rank: tiktoken joins the lowest rank first.

    Only the pair into which a token's own bytes merge can ever be adjacent; the other pairs do no harm.
    """
    found = []
    for token in sorted(ranks, key=ranks.__getitem__):
        pairs = ((token[:at], token[at:]) for at in range(1, len(token)))
        found += [pair for pair in pairs if pair[0] in ranks and pair[1] in ranks]
    return found


def _added(num_base: int, named: Mapping[int, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the added tokens without gaps, since the library assigns ids by counting."""
    flags = ("single_word", "lstrip", "rstrip", "normalized")
    end = max(num_base + NUM_RESERVED, *(number + 1 for number in named), 0)
    if end - num_base > MAX_ADDED:
        raise ValueError(f"added_tokens_decoder: {end - 1} is too far behind the last of {num_base} ranks")
    added = []
    for number in range(num_base, end):
        token = named.get(number, {})
        content = token.get("content", f"<|reserved_token_{number}|>")
        fields = {flag: bool(token.get(flag)) for flag in flags}
        added.append({"id": number, "content": content, **fields, "special": bool(token.get("special", True))})
    return added
