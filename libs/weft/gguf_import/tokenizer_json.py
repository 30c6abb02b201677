"""Makes tokenizer.json and its companions out of the vocabulary in a GGUF file."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from weft.gguf_import.gguf_file import GgufModel
from weft.model.fields import Fields
from weft.tokenizer import SETTINGS, TOKENIZER

KEY = "tokenizer.ggml."
UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 2, 3, 4, 5
"""Types of tokens in GGUF that are not ordinary text."""
ENDS = {"<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>"}
"""Control tokens that end an answer, as llama.cpp takes them, beside those that the metadata names."""
NAMES = {"bos_token": "bos_token_id", "eos_token": "eos_token_id", "unk_token": "unknown_token_id"}
NAMES["pad_token"] = "padding_token_id"

CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
UPPER, LOWER = (rf"[{case}\p{{Lm}}\p{{Lo}}\p{{M}}]" for case in (r"\p{Lu}\p{Lt}", r"\p{Ll}"))
CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*"
SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
MARKS = r" ?[^\s\p{L}\p{N}]+"
LLAMA3 = rf"{CONTRACTIONS}|{WORD}|\p{{N}}{{1,3}}|{MARKS}[\r\n]*|{SPACES}"
QWEN2 = rf"{CONTRACTIONS}|{WORD}|\p{{N}}|{MARKS}[\r\n]*|{SPACES}"
SEED = rf"{CONTRACTIONS}|{WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{SPACES}"
TEKKEN = rf"{CASED[0]}|{CASED[1]}|\p{{N}}|{MARKS}[\r\n/]*|{SPACES}"
GPT4O = rf"{CASED[0]}{CONTRACTIONS}?|{CASED[1]}{CONTRACTIONS}?|\p{{N}}{{1,3}}|{MARKS}[\r\n/]*|{SPACES}"
# Byte-level BPE keeps whole words of these vocabularies together, and begins a text with the first token.
WHOLE_WORDS = ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "tekken")
GPT2 = ("gpt-2", "phi-2", "olmo", "exaone4")
# GPT-2's rule after each digit stands alone.
DIGITS = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone")
PATTERNS = {
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral"), LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe", "glm4"), LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2", "megrez"), QWEN2),
    **dict.fromkeys(("gpt-4o", "llama4", "minimax-m2"), GPT4O),
    "tekken": TEKKEN,
    "seed-coder": SEED,
}
"""How text is split before merges, by the name in `tokenizer.ggml.pre`."""
Values = dict[str, Any]


def tokenizer_files(model: GgufModel) -> dict[str, Values | str]:
    """Return the content of each file by its name. Raises BadCheckpoint naming the key at fault."""
    fields = model.fields
    tokenizer = _byte_level(fields) if _kind(fields) == "gpt2" else _sentencepiece(fields, model.architecture)
    files: dict[str, Values | str] = {TOKENIZER: tokenizer, SETTINGS: _settings(fields)}
    _check(model, tokenizer)
    if template := fields.values.get("tokenizer.chat_template"):
        files["chat_template.jinja"] = str(template)
    return files


def end_tokens(fields: Fields) -> Values:
    """Return the ids of special tokens as config.json and generation_config.json have them."""
    tokens, ids = _tokens(fields), _special_ids(fields)
    more = (fields.values.get(f"{KEY}{name}_token_id") for name in ("eot", "eom"))
    control = (number for number, kind in enumerate(_types(fields)) if kind == CONTROL and tokens[number] in ENDS)
    ends = dict.fromkeys(each for each in (ids.get("eos_token"), *more, *control) if each is not None)
    found = {f"{name}_id": ids[name] for name in ("bos_token", "pad_token") if name in ids}
    return {**found, "eos_token_id": list(ends)}


def _kind(fields: Fields) -> str:
    return fields.choice(KEY + "model", ("gpt2", "llama"), "")


def _tokens(fields: Fields) -> list[str]:
    return fields.strings(KEY + "tokens")


def _types(fields: Fields) -> list[int]:
    types = fields.integers(KEY + "token_type", [1] * len(_tokens(fields)))
    if len(types) != len(_tokens(fields)):
        raise fields.error(KEY + "token_type", f"expected {len(_tokens(fields))} numbers, found {len(types)}")
    return types


def _special_ids(fields: Fields) -> dict[str, int]:
    """Return the ids of special tokens that the vocabulary has."""
    found = {name: fields.values.get(KEY + key) for name, key in NAMES.items()}
    size = len(_tokens(fields))
    return {name: number for name, number in found.items() if isinstance(number, int) and 0 <= number < size}


def _vocabulary(fields: Fields) -> dict[str, int]:
    """Return ids by token. Rows of the embedding without a token are left out."""
    found: dict[str, int] = {}
    for number, (token, kind) in enumerate(zip(_tokens(fields), _types(fields), strict=True)):
        if kind != UNUSED:
            found.setdefault(token, number)
    return found


def _byte_level(fields: Fields) -> Values:
    if not fields.values.get(KEY + "pre"):
        raise fields.error(KEY + "pre", "is missing, as in files of 2023; take a newer file of this model")
    pre = fields.choice(KEY + "pre", tuple(dict.fromkeys((*PATTERNS, *GPT2, *DIGITS))), "")
    merges = [each.split(" ") for each in fields.strings(KEY + "merges")]
    if bad := next((each for each in merges if len(each) != 2), None):
        raise fields.error(KEY + "merges", f"expected two tokens, found {' '.join(bad)!r}")
    return _tokenizer(
        fields,
        normalizer={"type": "NFC"} if pre == "qwen2" else None,
        pre_tokenizer=_pre_tokenizer(pre),
        decoder={"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False},
        model={"vocab": _vocabulary(fields), "merges": merges, "ignore_merges": pre in WHOLE_WORDS},
        adds_bos=pre in WHOLE_WORDS,
    )


def _pre_tokenizer(pre: str) -> Values:
    """Split text, then spell its bytes."""
    first: Values | None = None
    if pre in DIGITS:
        first = {"type": "Digits", "individual_digits": True}
    if pre in PATTERNS:
        first = {"type": "Split", "pattern": {"Regex": PATTERNS[pre]}, "behavior": "Isolated", "invert": False}
    spell = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": pre not in PATTERNS}
    return {"type": "Sequence", "pretokenizers": [first, spell]} if first else spell


def _sentencepiece(fields: Fields, architecture: str) -> Values:
    vocabulary, has_prefix = _vocabulary(fields), fields.boolean(KEY + "add_space_prefix", True)
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    prefix = [{"type": "Prepend", "prepend": "▁"}] if has_prefix else []
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if has_prefix else []
    back = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    return _tokenizer(
        fields,
        normalizer={"type": "Sequence", "normalizers": [*prefix, replace]},
        pre_tokenizer=None,
        decoder={"type": "Sequence", "decoders": [back, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip]},
        model={
            "vocab": vocabulary,
            "merges": _merges(vocabulary, _ranks(fields, has_scores=not architecture.startswith("gemma"))),
            "byte_fallback": True,
            "fuse_unk": True,
            "unk_token": _texts(fields).get("unk_token"),
        },
        adds_bos=True,
    )


def _ranks(fields: Fields, has_scores: bool) -> dict[str, float]:
    """Return the rank of each ordinary token: merges into the token of the lowest rank come first.

    Ids are in the order of the ranks too. Gemma's scores are not.
    """
    tokens, types = _tokens(fields), _types(fields)
    scores = fields.values.get(KEY + "scores") if has_scores else [-float(each) for each in range(len(tokens))]
    if not isinstance(scores, list) or len(scores) != len(tokens):
        raise fields.error(KEY + "scores", f"expected {len(tokens)} numbers")
    return {token: -score for token, score, kind in zip(tokens, scores, types, strict=True) if kind == 1}


def _merges(vocabulary: Mapping[str, int], ranks: Mapping[str, float]) -> list[tuple[str, str]]:
    """Return all pairs of tokens that make a token, those of the lowest rank first."""
    found: list[tuple[float, int, str, str]] = []
    for token, rank in ranks.items():
        for at in range(1, len(token)):
            if token[:at] in vocabulary and token[at:] in vocabulary:
                found.append((rank, -at, token[:at], token[at:]))
    return [(left, right) for _, _, left, right in sorted(found)]


def _tokenizer(fields: Fields, *, model: Values, adds_bos: bool, **parts: Any) -> Values:
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": list(_added(fields)),
        **parts,
        "post_processor": _post_processor(fields) if _adds_bos(fields, adds_bos) else None,
        "model": {"type": "BPE", **model},
    }


def _added(fields: Fields) -> Iterable[Values]:
    """Yield the tokens that are matched whole in a text."""
    special = set(_special_ids(fields).values())
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    for number, (token, kind) in enumerate(zip(_tokens(fields), _types(fields), strict=True)):
        if kind in (UNKNOWN, CONTROL, USER_DEFINED) or number in special:
            yield {"id": number, "content": token, **flags, "special": kind != USER_DEFINED}


def _adds_bos(fields: Fields, default: bool) -> bool:
    return fields.boolean(KEY + "add_bos_token", default) and "bos_token" in _special_ids(fields)


def _post_processor(fields: Fields) -> Values:
    token, number = _texts(fields)["bos_token"], _special_ids(fields)["bos_token"]
    first: Sequence[Values] = [{"SpecialToken": {"id": token, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    special = {token: {"id": token, "ids": [number], "tokens": [token]}}
    pair = [*first, {"Sequence": {"id": "B", "type_id": 1}}]
    return {"type": "TemplateProcessing", "single": first, "pair": pair, "special_tokens": special}


def _texts(fields: Fields) -> dict[str, str]:
    tokens = _tokens(fields)
    return {name: tokens[number] for name, number in _special_ids(fields).items()}


def _settings(fields: Fields) -> Values:
    return {
        # Reads tokenizer.json as it is; the class of a family would replace the rule that splits text.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **_texts(fields),
    }


def _check(model: GgufModel, tokenizer: Values) -> None:
    from tokenizers import Tokenizer

    try:
        Tokenizer.from_str(json.dumps(tokenizer))
    except Exception as error:  # the library raises no other class
        raise model.fields.error(KEY + "tokens", f"no tokenizer can be made of these ({error})") from error
