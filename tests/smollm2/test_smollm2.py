"""The converted model is what the GGUF file says, and `weft up` answers as transformers does, token for token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from loadtest.local_mesh import LocalMesh
from safetensors.torch import load_file
from tokenizers import Regex, Tokenizer, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from tests.smollm2.chats import CHATS, Message

MAX_TOKENS = 64
# Each number stands alone, then GPT-2's rule: what llama.cpp calls `smollm`.
DIGIT, GPT2 = r"\p{N}", r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


@pytest.mark.timeout(600)
def test_converted_weights_are_those_that_transformers_reads(gguf_file: Path, checkpoint: Path) -> None:
    theirs = AutoModelForCausalLM.from_pretrained(
        gguf_file.parent,
        gguf_file=gguf_file.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.bfloat16,
    ).state_dict()
    mine = load_file(checkpoint / "model.safetensors")
    assert set(theirs) - set(mine) == {"lm_head.weight"}  # tied
    assert all(torch.equal(each, theirs[name]) for name, each in mine.items())


def test_converted_tokenizer_splits_each_number(gguf_file: Path, checkpoint: Path) -> None:
    """transformers reads the vocabulary and merges right, but knows no rule `smollm`: it gets that rule here."""
    mine = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    read: Any = AutoTokenizer.from_pretrained(gguf_file.parent, gguf_file=gguf_file.name)
    theirs = read.backend_tokenizer
    split = [pre_tokenizers.Split(Regex(rule), "isolated") for rule in (DIGIT, GPT2)]
    theirs.pre_tokenizer = pre_tokenizers.Sequence([*split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    for text in [message["content"] for chat in CHATS for message in chat]:
        ids = mine.encode(text, add_special_tokens=False).ids
        assert ids == theirs.encode(text, add_special_tokens=False).ids, text
        assert mine.decode(ids) == text


@pytest.mark.timeout(300)
@pytest.mark.parametrize("chat", CHATS, ids=[f"{i}: {chat[-1]['content'][:30]!r}" for i, chat in enumerate(CHATS)])
def test_greedy_chat_equals_transformers(mesh: LocalMesh, oracle: Any, checkpoint: Path, chat: list[Message]) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(checkpoint)
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.no_grad():
        made = oracle.generate(**prompt, max_new_tokens=MAX_TOKENS, do_sample=False)[0]
    num_prompt = prompt["input_ids"].shape[1]
    expected = made[num_prompt:]
    body = {"model": checkpoint.name, "messages": chat, "temperature": 0, "max_tokens": MAX_TOKENS}
    answer = httpx.post(f"{mesh.url}/v1/chat/completions", json=body, timeout=120).raise_for_status().json()
    assert answer["choices"][0]["message"]["content"] == tokenizer.decode(expected, skip_special_tokens=True)
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (num_prompt, len(expected))


def test_there_are_55_different_chats() -> None:
    assert len({str(chat) for chat in CHATS}) == 55
