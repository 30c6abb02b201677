"""Reads a checkpoint's tokenizer.json, or builds it from tiktoken.model, which Kimi K2 and K2.5 have instead.

The build is byte-for-byte reproducible, so all services agree on its hash. No code of the model runs.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.errors import BadCheckpoint
from weft.file_io import path_exists, read_json_object, read_small, to_weft_error

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


def read_tokenizer(directory: Path) -> bytes:
    """Return the content of tokenizer.json. Raises BadCheckpoint naming the file, or StorageUnavailable."""
    _check_there(directory)
    path = directory / TOKENIZER
    try:
        if path.is_file():
            return read_small(path)
        ranks = _read_ranks(directory / RANKS)
        settings = directory / SETTINGS
        named = read_json_object(settings).get("added_tokens_decoder", {}) if settings.is_file() else {}
        return json.dumps(_converted(ranks, {int(number): token for number, token in named.items()})).encode()
    except OSError as error:
        raise to_weft_error(error, f"{directory}: {TOKENIZER} cannot be read, nor made from {RANKS}") from error
    except (ValueError, AttributeError) as error:
        raise BadCheckpoint(f"{directory}: {TOKENIZER} cannot be read, nor made from {RANKS}: {error}") from error


@dataclass(frozen=True, slots=True)
class EndToken:
    """The tokenizer's `eos_token`: text and id. `ids` is empty if the vocabulary lacks it."""

    text: str
    ids: tuple[int, ...]


def read_special_tokens(directory: Path) -> dict[str, str]:
    """Return the text of each special token by its name, as in `eos_token`.

    As in transformers, tokenizer_config.json wins over special_tokens_map.json. Raises BadCheckpoint or
    StorageUnavailable.
    """
    found: dict[str, str] = {}
    for file in (SETTINGS, SPECIAL_TOKENS_MAP):
        values = _settings(directory / file)
        for name in SPECIAL_TOKENS:
            token = values.get(name)
            text = token.get("content") if isinstance(token, dict) else token
            if isinstance(text, str):
                found.setdefault(name, text)
    return found


def read_end_token(directory: Path) -> EndToken | None:
    """Return the tokenizer's end token, or None if it names none. Raises BadCheckpoint or StorageUnavailable."""
    text = read_special_tokens(directory).get("eos_token")
    return EndToken(text, _ids_of(directory, text)) if text else None


def _ids_of(directory: Path, text: str) -> tuple[int, ...]:
    """Look in the short files first: tokenizer.json has up to 30 MB."""
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


def _settings(path: Path) -> dict[str, Any]:
    return read_json_object(path) if path_exists(path) else {}


def check_tokenizer(directory: Path) -> None:
    """Check that a tokenizer exists and is complete, without building one.

    Raises BadCheckpoint or StorageUnavailable.
    """
    _check_there(directory)
    path = directory / TOKENIZER
    if path.is_file() and "model" not in read_json_object(path):
        raise BadCheckpoint(f"{path}: model is missing; fetch the file again")
    if not path.is_file():
        try:
            read_small(directory / RANKS)
        except OSError as error:
            raise to_weft_error(error, f"{directory / RANKS}: not readable") from error


def _check_there(directory: Path) -> None:
    if not any(path_exists(directory / name) for name in (TOKENIZER, RANKS)):
        what = "copy the one that was published with the model beside its config.json"
        raise BadCheckpoint(f"{directory} has neither {TOKENIZER} nor {RANKS}; {what}")


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
    letter_of = {byte: letter for letter, byte in byte_letters().items()}
    spelled = {token: "".join(letter_of[byte] for byte in token) for token in ranks}
    model = {
        "type": "BPE",
        "vocab": {spelled[token]: rank for token, rank in ranks.items()},
        "merges": [[spelled[part] for part in pair] for pair in _merges(ranks)],
        # A piece that is a token as a whole needs no merges.
        "ignore_merges": True,
    }
    split = {"type": "Split", "pattern": {"Regex": PATTERN}, "behavior": "Isolated", "invert": False}
    letters = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    return {
        "version": "1.0",
        "added_tokens": _added(len(ranks), named),
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
