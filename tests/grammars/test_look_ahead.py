"""Constraints that look ahead at drafts: what they tell, and what the engine generates, is as without drafts."""

from __future__ import annotations

from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from llguidance import LLMatcher, LLParserLimits
from numpy.typing import NDArray
from safetensors.torch import load_file
from tokenizers import Tokenizer

from tests.grammars.schemas import random_schema
from tests.weft.engine.harness import Driver
from tests.weft.engine.scripted import ScriptedSpeculator, reader_of
from weft.grammar import GrammarConstraint, Grammars, load_grammars
from weft.model.config import read_config
from weft.request import NO_DRAFTS
from weft_services.gateway.generation import AnswerFormat, FormatKind
from weft_services.gateway.grammar.answer_grammar import format_parts, join_parts

NANO = Path(__file__).parents[2] / "models" / "weft-nano"
TOKENIZER = Tokenizer.from_file(str(NANO / "tokenizer.json"))
SCHEMA = {
    "type": "object",
    "properties": {"path": {"type": "string"}, "lines": {"type": "array", "items": {"type": "integer"}, "maxItems": 3}},
    "required": ["path", "lines"],
}
FORMATS: dict[str, tuple[FormatKind, Any]] = {
    "schema": (FormatKind.SCHEMA, SCHEMA),
    "regex": (FormatKind.REGEX, r"(/[a-z]{2,5}){1,3}/\d{1,9}\.txt"),
    "lark": (FormatKind.GRAMMAR, 'start: "a" NUM ("+" NUM){2}\nNUM: /[0-9]{1,3}/'),
    **{f"schema {seed}": (FormatKind.SCHEMA, random_schema(Random(seed))) for seed in range(4)},
}


@pytest.fixture(scope="module")
def nano() -> Any:
    return SimpleNamespace(config=read_config(NANO), weights=load_file(NANO / "model.safetensors"))


@pytest.fixture(scope="module")
def grammars(nano: Any) -> Grammars:
    return load_grammars(NANO, nano.config.vocab_size, nano.config.eos_token_ids)


def opened(grammars: Grammars, name: str) -> GrammarConstraint:
    return grammars.compile(join_parts(format_parts(AnswerFormat(*FORMATS[name], "response_format"))))


def mask_of(constraint: GrammarConstraint, nano: Any) -> NDArray[np.int32]:
    words = np.zeros(-(-nano.config.vocab_size // 32), dtype=np.int32)
    constraint.fill(words)
    return words


def allowed(mask: NDArray[np.int32]) -> list[int]:
    return [int(token) for token in np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))]


def random_answer(grammars: Grammars, nano: Any, name: str, random: Random) -> list[int]:
    """Tokens that the grammar allows, at most 40, with an end token where it comes to its end."""
    constraint, tokens = opened(grammars, name), list[int]()
    while len(tokens) < 40 and not set(tokens) & set(nano.config.eos_token_ids):
        tokens.append(random.choice(allowed(mask_of(constraint, nano))))
        constraint.accept(tokens[-1:])
    return tokens


@pytest.mark.parametrize("name", FORMATS)
def test_masks_after_a_rollback_equal_those_of_plain_steps(grammars: Grammars, nano: Any, name: str) -> None:
    random = Random(name)
    answer = random_answer(grammars, nano, name, random)
    plain, constraint, masks = opened(grammars, name), opened(grammars, name), list[NDArray[np.int32]]()
    for token in answer:
        masks.append(mask_of(plain, nano))
        plain.accept([token])
    for at in range(len(answer)):
        assert (mask_of(constraint, nano) == masks[at]).all()
        drafts = answer[at : at + random.randrange(8)]
        refused = random.choice(list({*range(nano.config.vocab_size)} - {*allowed(masks[at])}))
        assert constraint.valid([refused, *drafts]) == 0
        num_valid = constraint.valid(drafts)
        # Where nothing but an end token may follow, llguidance may call it invalid.
        assert num_valid == len(drafts) or drafts[num_valid:] == [nano.config.eos_token_ids[0]]
        for place, draft in enumerate(drafts[:num_valid], 1):
            constraint.accept([draft])
            assert at + place == len(answer) or (mask_of(constraint, nano) == masks[at + place]).all()
        constraint.rollback(num_valid)  # also from the failure that an end token may cause
        assert constraint.failure is None
        constraint.accept([answer[at]])


def test_a_failure_of_a_look_ahead_is_undone(grammars: Grammars, nano: Any) -> None:
    """A mask four tokens ahead exceeds the limits; the text may never come there."""
    limits = LLParserLimits(step_max_items=100, verbose_errors=False)
    text = 'start: a{0,200}\na: "a" | "a" "b" | "a" a "c"'
    start = LLMatcher(grammars._tokenizer, text, log_level=0, limits=limits)
    plain, constraint = GrammarConstraint(start), GrammarConstraint(start)
    (a,) = TOKENIZER.encode("a").ids
    for each in (plain, constraint):
        each.accept([a])
    for _ in range(3):
        constraint.accept([a])
        mask_of(constraint, nano)
    assert constraint.failure is not None
    assert constraint.valid([a]) == 0
    constraint.rollback(3)
    assert constraint.failure is None
    assert (mask_of(constraint, nano) == mask_of(plain, nano)).all()
    assert constraint.valid([a, a]) == 2


@pytest.mark.parametrize(("share_right", "is_varied"), [(1.0, False), (0.7, True), (0.0, False)])
def test_drafts_change_no_constrained_answer(
    grammars: Grammars, nano: Any, share_right: float, is_varied: bool
) -> None:
    ids = TOKENIZER.encode("<|im_start|>user\nGive me some JSON.<|im_end|>\n<|im_start|>assistant\n").ids
    prompt = ids[: len(ids) // 16 * 16 + 1]  # one token is left to compute behind the first one's blocks
    texts: dict[str, list[int]] = {}
    heard = {}
    for is_drafting in (False, True):
        speculator = ScriptedSpeculator(reader_of(texts), share_right, is_varied) if is_drafting else None
        with Driver(nano, num_blocks=400, speculator=speculator) as driver:
            driver.generate(prompt, 1, "first")
            keys = []
            for number, name in enumerate(FORMATS):
                fields = {"temperature": 1.0, "seed": number, "ignore_eos": False, "num_logprobs": 1}
                keys.append(driver.submit(name, prompt, 60, constraint=opened(grammars, name), **fields))
            for key in keys:
                heard[key.request_id, is_drafting] = driver.wait_end(key)
                texts[key.request_id] = prompt + driver.heard[key].tokens
            driver.assert_all_blocks_are_back()
    for name in FORMATS:
        plain, drafted = heard[name, False], heard[name, True]
        assert (drafted.tokens, drafted.reason, drafted.logprobs) == (plain.tokens, plain.reason, plain.logprobs)
    counts = sum((heard[name, True].drafts for name in FORMATS), NO_DRAFTS)
    assert counts.verified
    assert (counts.accepted == counts.verified) == (share_right == 1.0)
