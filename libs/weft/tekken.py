"""Reads tekken.json, the tokenizer file of checkpoints in Mistral's own layout.

The ids 0 to n - 1 are special tokens; a token of the vocabulary has the id n + rank. `config` gives n and the number of
all ids, at which the vocabulary is cut.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.errors import BadCheckpoint
from weft.file_io import read_json_object

TEKKEN = "tekken.json"
TEKKEN_NAMES = {"bos_token": "<s>", "eos_token": "</s>"}
MAX_SPECIAL, MAX_VOCABULARY = 100_000, 10_000_000
NUM_BYTES = 256


@dataclass(frozen=True, slots=True)
class Tekken:
    """Content of tekken.json: the regex that splits text, special tokens by id, and ranks by token."""

    pattern: str
    special: tuple[str, ...]
    ranks: dict[bytes, int]


def read_tekken(path: Path) -> Tekken:
    """Read and check the whole file. Raises BadCheckpoint naming file and field, or StorageUnavailable."""
    values = read_json_object(path)
    try:
        config = values.get("config")
        if not isinstance(config, dict):
            raise ValueError(f"config: expected an object, found {type(config).__name__}")
        if not isinstance(pattern := config.get("pattern"), str):
            raise ValueError(f"config.pattern: expected text, found {type(pattern).__name__}")
        num_special = _count(config, "default_num_special_tokens", MAX_SPECIAL)
        num_ids = _count(config, "default_vocab_size", MAX_VOCABULARY)
        special = _special(values.get("special_tokens"), num_special)
        return Tekken(pattern, special, _ranks(values.get("vocab"), num_ids - num_special))
    except ValueError as error:
        raise BadCheckpoint(f"{path}: {error}; fetch the file again, or add the model's tokenizer.json") from error


def _count(config: dict[str, Any], field: str, most: int) -> int:
    value = config.get(field)
    if type(value) is not int or not 0 < value <= most:
        raise ValueError(f"config.{field}: expected a whole number from 1 to {most}, found {value!r:.40}")
    return value


def _special(entries: Any, count: int) -> tuple[str, ...]:
    """Return the special tokens by id; those that the file does not list get the name of their id."""
    if not isinstance(entries, list):
        raise ValueError("special_tokens: the list is missing, as in files of 2024")
    if len(entries) > count:
        raise ValueError(f"special_tokens: expected at most {count}, found {len(entries)}")
    named = []
    for place, entry in enumerate(entries):
        if not isinstance(entry, dict) or entry.get("rank") != place or not isinstance(entry.get("token_str"), str):
            raise ValueError(f"special_tokens[{place}]: expected rank {place} and a token_str, found {entry!r:.80}")
        named.append(entry["token_str"])
    named += [f"<SPECIAL_{number}>" for number in range(len(named), count)]
    if len(set(named)) < count or "" in named:
        raise ValueError("special_tokens: a token_str is empty or occurs twice")
    if missing := [text for text in TEKKEN_NAMES.values() if text not in named]:
        raise ValueError(f"special_tokens: expected also {' and '.join(missing)}")
    return tuple(named)


def _ranks(entries: Any, count: int) -> dict[bytes, int]:
    """Return the first `count` tokens of the vocabulary, which starts with the 256 bytes."""
    if not isinstance(entries, list):
        raise ValueError(f"vocab: expected a list, found {type(entries).__name__}")
    if not NUM_BYTES <= count <= len(entries):
        raise ValueError(f"vocab: has {len(entries)} tokens; config asks for {count} of at least {NUM_BYTES}")
    ranks: dict[bytes, int] = {}
    for rank, entry in enumerate(entries[:count]):
        try:
            token = base64.b64decode(entry["token_bytes"], validate=True)
            is_good = entry["rank"] == rank and bool(token) and (rank >= NUM_BYTES or token == bytes([rank]))
        except (TypeError, KeyError, ValueError):
            is_good = False
        if not is_good or ranks.setdefault(token, rank) != rank:
            raise ValueError(f"vocab[{rank}]: expected rank {rank} and token_bytes of its own, found {entry!r:.80}")
    return ranks
