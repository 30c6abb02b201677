"""Twins of a grammar: the tokens that they force, on answers with and without spaces, alone and inside tool calls."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from weft.grammar import MAX_GRAMMAR_CHARS, GrammarConstraint, Grammars, load_grammars, twin_texts
from weft.model.config import read_config
from weft_services.gateway.generation import AnswerFormat, FormatKind
from weft_services.gateway.grammar.answer_grammar import format_parts, join_parts, lark_part, schema_part

NANO = Path(__file__).parents[2] / "models" / "weft-nano"
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "unit": {"enum": ["celsius", "fahrenheit"]},
        "sources": {"type": "array", "items": {"enum": ["station"]}, "minItems": 2, "maxItems": 2},
    },
    "required": ["city", "days", "unit", "sources"],
    "additionalProperties": False,
}
ANSWER = {"city": "Paris", "days": 3, "unit": "celsius", "sources": ["station", "station"]}
ARGUMENTS = schema_part(SCHEMA, "arguments", "tools")
ALONE = join_parts([ARGUMENTS])
CALL = join_parts([lark_part('start: "<call name=weather>" @arguments "</call>"', "answer"), ARGUMENTS])


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    config = read_config(NANO)
    return load_grammars(NANO, config.vocab_size, config.eos_token_ids)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(NANO / "tokenizer.json"))


def steps_of(constraint: GrammarConstraint, answer: list[int]) -> tuple[int, int, int]:
    """Return the steps, drafts and accepted drafts of an answer when all forced tokens are drafts."""
    steps = verified = accepted = place = 0
    while place < len(answer):
        drafts = constraint.forced()
        drafts = drafts[: constraint.valid(drafts)]
        rest = answer[place:]
        right = next(
            (i for i, draft in enumerate(drafts[: len(rest)]) if draft != rest[i]), min(len(drafts), len(rest))
        )
        # The engine fills the masks of all rows, then takes the rejected drafts back.
        constraint.accept(drafts)
        constraint.rollback(len(drafts))
        constraint.accept(rest[: right + 1])
        assert constraint.failure is None
        place += right + 1
        steps, verified, accepted = steps + 1, verified + len(drafts), accepted + right
    return steps, verified, accepted


@pytest.mark.parametrize("separators", [(", ", ": "), (",", ":")], ids=["spaces", "compact"])
@pytest.mark.parametrize("text", [ALONE, CALL], ids=["alone", "tool call"])
def test_twins_force_most_tokens(
    grammars: Grammars, tokenizer: Tokenizer, text: str, separators: tuple[str, str]
) -> None:
    written = json.dumps(ANSWER, separators=separators)
    answer = tokenizer.encode(f"<call name=weather>{written}</call>" if text == CALL else written).ids
    steps, verified, accepted = steps_of(grammars.compile(text, with_twins=True), answer)
    plain_steps, *_ = steps_of(grammars.compile(text), answer)
    assert len(answer) / steps > 2.5
    assert steps < 0.75 * plain_steps
    assert accepted >= 0.8 * verified


def test_text_that_leaves_all_twins_follows_the_grammar(grammars: Grammars, tokenizer: Tokenizer) -> None:
    answer = tokenizer.encode(json.dumps(ANSWER, indent=1)).ids
    with_twins, without = (steps_of(grammars.compile(ALONE, twins), answer) for twins in (True, False))
    assert with_twins[0] < len(answer)
    assert with_twins[0] <= without[0] + 1


def test_twins_fix_the_separators_of_json_alone() -> None:
    twins = [json.loads(text)["grammars"] for text in twin_texts(CALL)]
    assert [twin[0] for twin in twins] == [json.loads(CALL)["grammars"][0]] * 2
    options = [twin[1]["json_schema"].pop("x-guidance") for twin in twins]
    assert [(each["item_separator"], each["key_separator"]) for each in options] == [(", ", ": "), (",", ":")]
    assert all(twin[1]["json_schema"] == SCHEMA for twin in twins)


@pytest.mark.parametrize("text", ["start: /a+/", "[]", '{"grammars": 3}', '{"grammars": [{"json_schema": true}]}'])
def test_other_grammars_have_no_twins(text: str) -> None:
    assert twin_texts(text) == []


def test_a_grammar_forces_tokens_without_twins(grammars: Grammars, tokenizer: Tokenizer) -> None:
    text = join_parts(format_parts(AnswerFormat(FormatKind.REGEX, "(yes|no), and that is final", "format"), "answer"))
    answer = tokenizer.encode("no, and that is final").ids
    assert steps_of(grammars.compile(text, with_twins=True), answer)[0] < len(answer) / 2


def test_a_twin_that_does_not_compile_is_left_out(grammars: Grammars) -> None:
    longest = {**SCHEMA, "description": "d" * (MAX_GRAMMAR_CHARS - len(ALONE) - 20)}
    text = join_parts([schema_part(longest, "arguments", "tools")])
    assert len(text) <= MAX_GRAMMAR_CHARS < len(twin_texts(text)[0])
    assert grammars.compile(text, with_twins=True).forced() == []
