"""Answer formats: what reaches the workers is a grammar that means what was asked; what cannot be kept is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from tests.services.gateway.conftest import END, MODEL_NAME, MakeBench
from tests.services.gateway.fakes import speaking
from weft.grammar import hash_tokenizer

USER: Any = {"role": "user", "content": "hi"}

LAST = "\U0010ffff"
# each of them would take seconds, or all memory, without limits
BOMBS: dict[str, dict[str, Any]] = {
    "look-around": {"guided_regex": "(?=a)b"},
    "brackets": {"guided_regex": "(" * 2000 + "a" + ")" * 2000},
    "doubling terminals": {
        "guided_grammar": "start: R0\n" + "\n".join(f"R{i}: R{i + 1} R{i + 1}" for i in range(60)) + '\nR60: "x"'
    },
    "doubling rules": {
        "guided_grammar": "root ::= r0\n"
        + "\n".join(f"r{i} ::= r{i + 1} r{i + 1}" for i in range(60))
        + '\nr60 ::= "x"'
    },
    "nested brackets": {"guided_grammar": "root ::= " + "(" * 3000 + '"a"' + ")" * 3000},
    "not a grammar": {"guided_grammar": "start: %%%"},
    "no rules": {"guided_grammar": "none"},
    "no root": {"guided_grammar": "# nothing"},
    "an open string": {"guided_grammar": 'root ::= "a'},
    "an open group": {"guided_grammar": "root ::= ("},
    "a schema in a grammar": {"guided_grammar": 'start: %json {"type": "integer", "multipleOf": 99731}'},
    "wide classes without case": {"guided_regex": "(?i)" + f"[!-{LAST}]" * 17},
    "negations without case": {"guided_regex": "(?xi)" + "[ [ ^ a] b]" * 9},
    "properties without case": {"guided_regex": "(?s)(?mi:" + r"\pL" * 17 + ")"},
    "intersections without case": {"guided_regex": "(?i)[" + "&&".join([r"\S"] * 18) + "]"},
    "wide classes of a grammar without case": {"guided_grammar": "start: " + r"/[\W]/i " * 17},
    "wide classes of properties without case": {
        "guided_json": {"properties": {f"p{i}": {"pattern": r"(?i)[\x21-\uFFFF]"} for i in range(17)}}
    },
    "wide classes of names without case": {
        "guided_json": {"patternProperties": {f"(?i)^p{i}[!-{LAST}]$": {} for i in range(17)}}
    },
    "a number beyond 64 bits": {"guided_json": {"type": "integer", "maximum": 2**64}},
    "the least number of 64 bits": {"guided_json": {"const": -(2**63)}},
    "a number that is nearly that": {"guided_json": {"items": {"enum": [["x", {"y": 1 - 2**63}]]}}},
    "a bound below 64 bits": {"guided_json": {"type": "integer", "minimum": -9.3e18, "maximum": -9.3e18}},
    "a large number that is no double": {"guided_json": {"const": 2**53 + 1}},
    "a large number of more than 63 bits": {"guided_json": {"enum": [2**63]}},
    "a bound that is no double": {"guided_json": {"type": "integer", "maximum": 2**53 + 3}},
    "multiples of what is below 0": {"guided_json": {"type": "number", "multipleOf": -(2**31)}},
    "remainders": {"guided_json": {"allOf": [{"type": "integer", "multipleOf": 997}, {"multipleOf": 991}]}},
    "unions of unions": {
        "guided_json": {
            "allOf": [
                {"anyOf": [{"properties": {f"p{i}{j}": {"type": "integer"}}} for j in range(6)]} for i in range(8)
            ]
        }
    },
    "many properties": {"guided_json": {"properties": {f"p{i}": {} for i in range(3000)}}},
    "a schema that is itself": {"guided_json": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}},
    "a remote schema": {"guided_json": {"$ref": "http://example.com/schema"}},
    "a keyword that cannot be kept": {"guided_json": {"type": "array", "uniqueItems": True}},
}


class Person(BaseModel):
    """What the SDK makes a schema of."""

    name: str
    age: int


@pytest.mark.parametrize("fields", BOMBS.values(), ids=BOMBS)
async def test_what_cannot_be_kept_is_refused_and_named(bench: MakeBench, fields: dict[str, Any]) -> None:
    async with bench() as b:
        status, error = await b.refused("/v1/chat/completions", messages=[USER], **fields)
        assert (status, error["param"]) == (400, next(iter(fields)))
        assert next(iter(fields)) in error["message"]
        assert not b.decode.started


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"json_object": False}}, "structured_outputs"),
        ({"structured_outputs": {"regexp": "a"}}, "structured_outputs.regexp"),
        ({"structured_outputs": {"regex": "a", "whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern"),
        (
            {"structured_outputs": {"json": {}, "disable_any_whitespace": True}},
            "structured_outputs.disable_any_whitespace",
        ),
        ({"guided_json": {}, "guided_whitespace_pattern": " "}, "guided_whitespace_pattern"),
        ({"guided_json": {}, "regex": "a"}, "regex"),
        ({"include_reasoning": False}, "include_reasoning"),
        ({"thinking_token_budget": 5}, "thinking_token_budget"),
    ],
)
async def test_what_would_bind_nothing_is_refused(bench: MakeBench, fields: dict[str, Any], param: str) -> None:
    async with bench() as b:
        status, error = await b.refused("/v1/chat/completions", messages=[USER], **fields)
        assert (status, error["param"]) == (400, param)


async def test_the_sdks_parse_helper_gets_its_schema_kept(bench: MakeBench, model_dir: Path) -> None:
    async with bench() as b:
        b.decode.script = speaking([*b.ids('{"name": "Ann", "age": 7}'), END])
        answer = await b.client.chat.completions.parse(model=MODEL_NAME, messages=[USER], response_format=Person)
        assert answer.choices[0].message.parsed == Person(name="Ann", age=7)
        sent = b.decode.started[0].sampling.grammar
        assert sent.tokenizer_hash == hash_tokenizer((model_dir / "tokenizer.json").read_bytes())
        schema = json.loads(sent.text)["grammars"][0]["json_schema"]
        assert schema["required"] == ["name", "age"]
        assert b.allows('{"name": "Bob", "age": 12}')
        assert not b.allows('{"name": "Bob", "age": 12},', is_whole=False)


async def test_without_a_format_no_grammar_is_sent(bench: MakeBench) -> None:
    async with bench() as b:
        await b.client.chat.completions.create(model=MODEL_NAME, messages=[USER], response_format={"type": "text"})
        assert not b.decode.started[0].sampling.HasField("grammar")


@pytest.mark.parametrize(
    ("fields", "good", "bad"),
    [
        ({"guided_regex": "a/b[0-9]"}, "a/b7", "a/c"),
        ({"guided_regex": re.escape("a\n/b")}, "a\n/b", "a\\n/b"),
        ({"guided_regex": "(?i)" + "[a-z]" * 40}, "Ab" * 20, "a0"),
        ({"guided_regex": f"[!-{LAST}]" * 40}, "Ab" * 20, "a "),
        ({"guided_regex": f"(?i)[b-{LAST}]" * 4}, "Bcde", "a0"),
        ({"guided_choice": ["one", 'two "three"']}, 'two "three"', "two t"),
        ({"structured_outputs": {"grammar": 'root ::= "x" [0-9]+'}}, "x12", "xx"),
        ({"guided_grammar": '?start: "x" | digits\ndigits: /[0-9]+/'}, "12", "xx"),
        ({"ebnf": 'root ::= "x" [0-9]+'}, "x12", "xx"),
        ({"regex": "[0-9]+"}, "12", "x"),
        ({"json_schema": {"type": "array", "uniqueItems": False, "items": {"type": "integer"}}}, "[1, 1]", '["a"]'),
        ({"guided_json": {"const": 2**53}}, str(2**53), str(2**53 + 1)),
        ({"guided_json": {"enum": [2**63 - 1, -(2**62)]}}, str(2**63 - 1), str(2**63)),
        ({"guided_json": {"type": "integer", "maximum": 2**63 - 1}}, str(2**63 - 1), str(2**63)),
        ({"response_format": {"type": "json_object"}}, '{"a": [1, {"b": null}]}', "[1]"),
        (
            {
                "response_format": {
                    "type": "structural_tag",
                    "structures": [{"begin": "<f=a>", "schema": {"type": "integer"}, "end": "</f>"}],
                    "triggers": ["<f"],
                }
            },
            "some text <f=a>12</f> more <f=a>3</f>",
            "some text <f=b>",
        ),
    ],
    ids=[
        *("regex", "escaped", "no case", "wide", "wide without case", "choice", "grammar", "Lark", "SGLang's grammar"),
        *("SGLang's regex", "llama.cpp's schema", "a double", "int64", "int64's bound", "object", "tags"),
    ],
)
async def test_every_spelling_means_what_it_says(bench: MakeBench, fields: dict[str, Any], good: str, bad: str) -> None:
    async with bench() as b:
        body = {"model": MODEL_NAME, "prompt": "x", **fields}
        assert (await b.http.post("/v1/completions", json=body)).status_code == 200
        assert b.allows(good)
        assert not b.allows(bad, is_whole=False)
