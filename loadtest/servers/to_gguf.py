"""A checkpoint with a byte-level BPE tokenizer as GGUF, for llama.cpp's server.

    python -m loadtest.servers.to_gguf FOLDER DTYPE

Runs in llama.cpp's environment (`loadtest/engine/peers.sh llama`); prints where the file is. GGUF names one of
llama.cpp's own rules for how text is split before merges; "qwen2" is nearest to weft-nano's, which splits digits too.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import gguf

from loadtest.engine.cpu_llama import convert

SPLITTING = "qwen2"


def add_tokenizer(writer: Any, folder: Path) -> None:
    """Tokens in the order of their ids, what kind each is, and merges."""
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    config = json.loads((folder / "config.json").read_text())
    added = {each["id"]: each for each in tokenizer["added_tokens"]}
    names = {number: text for text, number in tokenizer["model"]["vocab"].items()}
    names |= {number: each["content"] for number, each in added.items()}
    tokens = [names.get(number, f"[unused{number}]") for number in range(config["vocab_size"])]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(SPLITTING)
    writer.add_token_list(tokens)
    writer.add_token_types([_kind(number, names, added) for number in range(len(tokens))])
    writer.add_token_merges([" ".join(merge) for merge in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_add_bos_token(False)


def _kind(number: int, names: dict[int, str], added: dict[int, Any]) -> gguf.TokenType:
    if number not in names:
        return gguf.TokenType.UNUSED
    if number not in added:
        return gguf.TokenType.NORMAL
    return gguf.TokenType.CONTROL if added[number]["special"] else gguf.TokenType.USER_DEFINED


def main() -> None:
    """Convert; the path is the last line."""
    folder, dtype = Path(sys.argv[1]), sys.argv[2]
    print(convert(folder, dtype, lambda writer: add_tokenizer(writer, folder)))


if __name__ == "__main__":
    main()
