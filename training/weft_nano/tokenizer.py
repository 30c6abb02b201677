"""Trains the vocabulary: a byte-level BPE of 2048 tokens that keeps digits and newlines apart.

A capitalised word never swallows the space before it, so a name is the same tokens wherever it stands, and
copying it is easy. Adds no token by itself: the chat template writes every special token.
"""

import json
import random
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from training.weft_nano.dialogues import make_dialogue
from training.weft_nano.entities import Source

VOCABULARY_SIZE = 2048
MAX_TOKENS = 2048
BOS, EOS, START, PAD = "<|bos|>", "<|im_end|>", "<|im_start|>", "<|pad|>"
MARKERS = ("<tools>", "</tools>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
TEMPLATE = Path(__file__).with_name("chat_template.jinja")

# Newlines and digits alone; lower-case words and punctuation take the space before them, capitals do not.
PIECES = r"\n|\p{N}| ?[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|\p{Lu}[\p{Ll}\p{M}]*|\p{Lt}| ?[^\s\p{L}\p{N}\p{M}]+|[^\S\n]"


def _corpus(seed: int, count: int) -> list[str]:
    source = Source(random.Random(f"tokenizer {seed}"))
    texts = []
    for _ in range(count):
        dialogue = make_dialogue(source, 600)
        for message in dialogue.messages:
            texts.append(message["content"] or json.dumps(message["tool_calls"][0]["function"]))
        texts += [json.dumps(tool["function"]) for tool in dialogue.tools]
    roles = ["system\nuser\nassistant\ntool\n"] * count
    return texts + roles


def train_tokenizer(seed: int, count: int = 3000) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    # The tool markers are ordinary text to a decoder: whoever reads the answer must see them.
    special = [AddedToken(t, special=True, normalized=False) for t in (PAD, BOS, EOS, START)]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE - len(MARKERS),
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus(seed, count), trainer)
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in MARKERS])
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        additional_special_tokens=[START],
        model_max_length=MAX_TOKENS,
        clean_up_tokenization_spaces=False,
        chat_template=TEMPLATE.read_text(),
    )


def load_tokenizer(checkpoint: Path) -> PreTrainedTokenizerFast:
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    return tokenizer


def render(
    tokenizer: PreTrainedTokenizerFast, messages: list[Any], tools: list[Any] | None = None, is_open: bool = False
) -> str:
    """The conversation as the chat template writes it; `is_open` where the assistant is to speak next."""
    text = tokenizer.apply_chat_template(messages, tools=tools or None, add_generation_prompt=is_open, tokenize=False)
    assert isinstance(text, str)
    return text


def token_id(tokenizer: PreTrainedTokenizerFast, token: str) -> int:
    number = tokenizer.convert_tokens_to_ids(token)
    assert isinstance(number, int)
    return number
