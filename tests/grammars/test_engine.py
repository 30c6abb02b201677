"""Grammars in the engine's batch: every answer matches its own, alone, together, preempted, handed off and resumed."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest
from safetensors.torch import load_file
from tokenizers import Tokenizer

from tests.grammars.schemas import random_schema
from tests.weft.engine.harness import Driver, Heard, hand_over, prefill
from weft.engine.messages import Constraint
from weft.errors import InvalidRequest
from weft.grammar import Grammars, load_grammars
from weft.model.config import read_config
from weft.request import FinishReason
from weft_services.gateway.generation import AnswerFormat, FormatKind
from weft_services.gateway.grammar.answer_grammar import format_parts, join_parts

NANO = Path(__file__).parents[2] / "models" / "weft-nano"
SAMPLED: dict[str, Any] = {"temperature": 1.0, "seed": 3, "ignore_eos": False}


@pytest.fixture(scope="module")
def nano() -> Any:
    """weft-nano as the engine's harness takes models."""
    return SimpleNamespace(config=read_config(NANO), weights=load_file(NANO / "model.safetensors"))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(NANO / "tokenizer.json"))


@pytest.fixture(scope="module")
def grammars(nano: Any) -> Grammars:
    return load_grammars(NANO, nano.config.vocab_size, nano.config.eos_token_ids)


@pytest.fixture(scope="module")
def driver(nano: Any) -> Iterator[Driver]:
    with Driver(nano, num_blocks=400, dtype="float32") as running:
        yield running


@pytest.fixture(scope="module")
def prompt(tokenizer: Tokenizer) -> list[int]:
    text = "<|im_start|>user\nGive me some JSON.<|im_end|>\n<|im_start|>assistant\n"
    return list(tokenizer.encode(text).ids)


Spoken = Callable[[Heard], str]


@pytest.fixture(scope="module")
def spoken(tokenizer: Tokenizer) -> Spoken:
    def text(heard: Heard) -> str:
        assert heard.reason is FinishReason.STOP, "the answer did not come to its end"
        return str(tokenizer.decode(heard.tokens))

    return text


def constraint(grammars: Grammars, kind: FormatKind, value: Any) -> Constraint:
    return grammars.compile(join_parts(format_parts(AnswerFormat(kind, value, "response_format"))))


def test_every_schema_of_many_is_kept_in_one_batch_each_by_its_own(
    driver: Driver, grammars: Grammars, prompt: list[int], spoken: Spoken
) -> None:
    random = Random(5)
    schemas = [random_schema(random) for _ in range(48)]
    keys = []
    for number, schema in enumerate(schemas):
        options = SAMPLED | {"seed": number, "constraint": constraint(grammars, FormatKind.SCHEMA, schema)}
        keys.append(driver.submit(f"schema-{number}", prompt, 300, **options))
    free = driver.submit("free", prompt, 40, **SAMPLED)
    ends = [driver.wait_end(key) for key in keys]
    finished = [number for number, end in enumerate(ends) if end.reason is FinishReason.STOP]
    assert len(finished) > 40, "the others went on with fractions of numbers, which no schema bounds"
    for number in finished:
        jsonschema.validate(json.loads(spoken(ends[number])), schemas[number])
    alone = driver.generate(prompt, 40, "free alone", **SAMPLED)
    assert driver.wait_end(free).tokens == alone.tokens


@pytest.mark.parametrize(
    ("kind", "value", "matches"),
    [
        # bounded everywhere: how long a model goes on where it may is its own affair
        (FormatKind.REGEX, r"(/[a-z]{2,5}){1,3}/\d{1,9}\.txt", r"(/[a-z]{2,5}){1,3}/\d{1,9}\.txt"),
        (FormatKind.CHOICE, ("yes", "no/never", 'a "maybe"'), r'yes|no/never|a "maybe"'),
        (FormatKind.GRAMMAR, 'start: "a" NUM ("+" NUM){2}\nNUM: /[0-9]{1,3}/', r"a\d{1,3}(\+\d{1,3}){2}"),
        (FormatKind.GRAMMAR, 'root ::= "x" [0-9] ("b" | "c")?', r"x\d[bc]?"),
    ],
    ids=["regex", "choice", "lark", "gbnf"],
)
def test_other_grammars_are_kept(
    driver: Driver, grammars: Grammars, prompt: list[int], spoken: Spoken, kind: FormatKind, value: Any, matches: str
) -> None:
    for seed in range(3):
        options = SAMPLED | {"seed": seed, "constraint": constraint(grammars, kind, value)}
        answer = spoken(driver.generate(prompt, 200, f"{kind}{value}{seed}", **options))
        assert re.fullmatch(matches, answer), answer


def test_the_same_text_comes_of_it_wherever_it_is_continued(nano: Any, grammars: Grammars, prompt: list[int]) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}}, "required": ["b"]}

    def options() -> dict[str, Any]:
        return SAMPLED | {"constraint": constraint(grammars, FormatKind.SCHEMA, schema)}

    with Driver(nano) as source, Driver(nano) as target:
        whole = source.generate(prompt, 200, "whole", **options()).tokens
        for num_resumed in (0, 1, len(whole) // 2, len(whole) - 1):
            name, so_far = f"from {num_resumed}", prompt + whole[:num_resumed]
            fields = {"resumed_tokens": num_resumed, "cache_salt": bytes([num_resumed])}
            key = target.submit(name, so_far, 200, wait_for_kv=True, **fields, **options())
            reserved = target.wait_reserved(key)
            first, lent = prefill(source, name, so_far, **fields, **options())
            hand_over(source, lent, target, reserved, len(so_far))
            target.engine.complete_kv(key, len(so_far), first)
            assert whole[:num_resumed] + target.wait_end(key).tokens == whole


def test_tokens_that_do_not_fit_fail_their_sequence(driver: Driver, grammars: Grammars, prompt: list[int]) -> None:
    digits = constraint(grammars, FormatKind.REGEX, "[0-9]{8}")
    key = driver.submit("odd", [*prompt, prompt[0]], 20, resumed_tokens=1, constraint=digits, **SAMPLED)
    driver.wait(lambda: driver.heard[key].failure is not None)
    failure = driver.heard[key].failure
    assert failure is not None
    assert isinstance(failure.error, InvalidRequest)
