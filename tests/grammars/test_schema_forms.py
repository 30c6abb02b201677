"""Schemas as generators write them: what binds nothing is passed over, the rest is kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest
from tokenizers import Tokenizer

from tests.grammars.walk import Walk
from weft.errors import InvalidRequest
from weft.grammar import Grammars, load_grammars
from weft.model.config import read_config
from weft_services.gateway.grammar.answer_grammar import join_parts, schema_part
from weft_services.gateway.grammar.schema_rewrite import supported_schema

NANO = Path(__file__).parents[2] / "models" / "weft-nano"
CONFIG = read_config(NANO)
TEXT = {"type": "string", "maxLength": 4}


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return load_grammars(NANO, CONFIG.vocab_size, CONFIG.eos_token_ids)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(NANO / "tokenizer.json"))


def answers(schema: dict[str, Any], grammars: Grammars, tokenizer: Tokenizer) -> list[Any]:
    """Some that the grammar of the schema allows."""
    text = join_parts([schema_part(schema, "answer", "schema")])
    walks = [Walk(tokenizer, CONFIG.vocab_size, CONFIG.eos_token_ids, seed) for seed in range(6)]
    return [json.loads(walk.answer(grammars.compile(text))) for walk in walks]


def union(*branches: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Of objects, each a definition of its own."""
    names = [f"B{number}" for number in range(len(branches))]
    made = [{"type": "object", "additionalProperties": False, **branch} for branch in branches]
    options = [{"$ref": f"#/$defs/{name}"} for name in names]
    return {"oneOf": options, "$defs": dict(zip(names, made, strict=True)), **more}


def tagged(tag: Any, *required: str) -> dict[str, Any]:
    return {"properties": {"kind": tag, "n": {"type": "boolean"}}, "required": list(required)}


IDLE: dict[str, dict[str, Any]] = {
    "annotations": {
        **TEXT,
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": "https://example.com/name",
        "$comment": "c",
        "$anchor": "a",
        "title": "t",
        "description": "d",
        "default": "x",
        "examples": ["a"],
        "deprecated": True,
        "readOnly": True,
        "writeOnly": False,
        "contentEncoding": "base64",
        "contentMediaType": "application/json",
        "contentSchema": {"uniqueItems": True},
        "x-order": 1,
        "x-enum": {"not": {}},
    },
    "OpenAPI's": {
        **TEXT,
        "nullable": True,
        "example": {"format": "password"},
        "xml": {"name": "x"},
        "externalDocs": {"url": "http://example.com"},
        "discriminator": {"propertyName": "kind"},
    },
    "OpenAPI's nullable false": {**TEXT, "nullable": False},
    "editors'": {
        "enum": ["a", "b"],
        "enumDescriptions": ["A", "B"],
        "markdownDescription": "*",
        "enumNames": ["A", "B"],
    },
    "unset keywords": {**TEXT, "minLength": None, "pattern": None, "enum": None, "format": None, "title": None},
    "unset keywords of objects": {
        "type": "object",
        "properties": {"a": TEXT},
        "required": None,
        "additionalProperties": False,
    },
    "whole numbers with a point": {"type": "array", "items": {"type": "boolean"}, "minItems": 1.0, "maxItems": 2.0},
    "an unknown format": {"type": "string", "format": "password", "maxLength": 4},
    "a format of integers": {"type": "integer", "format": "int64", "minimum": 0, "maximum": 9},
    "an unknown format of any type": {"format": "uint8", "enum": [1, "a"]},
    "unused definitions": {
        **TEXT,
        "$defs": {"a": {"not": {"type": "string"}}},
        "definitions": {"b": {"type": "array", "uniqueItems": True}},
    },
    "another dialect": {**TEXT, "$schema": "http://json-schema.org/schema#"},
    "a dialect of its own": {**TEXT, "$schema": "https://spec.openapis.org/oas/3.1/dialect/base"},
    "dynamic anchors": {**TEXT, "$dynamicAnchor": "a"},
    "no bounds": {"type": "string", "minLength": 0, "maxLength": 3},
    "no bounds of objects": {
        "type": "object",
        "properties": {"a": TEXT},
        "minProperties": 0,
        "additionalProperties": False,
    },
    "items that may repeat": {"type": "array", "items": TEXT, "uniqueItems": False, "maxItems": 2},
    "one item, which is unique": {"type": "array", "items": TEXT, "uniqueItems": True, "maxItems": 1},
    "unevaluated ones that may be": {"type": "array", "items": TEXT, "unevaluatedItems": True, "maxItems": 2},
    "unevaluated properties": {
        "type": "object",
        "properties": {"a": TEXT},
        "required": ["a"],
        "maxProperties": 1,
        "unevaluatedProperties": {},
    },
    "additional items": {
        "type": "array",
        "prefixItems": [{"const": 1}, {"const": 2}],
        "additionalItems": True,
        "items": False,
    },
    "dependencies of nothing": {
        "type": "object",
        "properties": {"a": TEXT},
        "additionalProperties": False,
        "dependentRequired": {"a": []},
        "dependentSchemas": {"a": True},
        "dependencies": {},
        "patternProperties": {},
    },
    "dependencies that are met": {
        "type": "object",
        "properties": {"a": TEXT, "b": TEXT},
        "required": ["a"],
        "additionalProperties": False,
        "dependentRequired": {"b": ["a"]},
        "dependencies": {"b": ["a"], "a": {}},
    },
    "a condition without effect": {**TEXT, "if": {"minLength": 2}},
    "a condition with open branches": {**TEXT, "if": {"minLength": 2}, "then": True, "else": {"title": "t"}},
    "branches without a condition": {**TEXT, "then": False, "else": {"not": {}}},
    "not nothing": {**TEXT, "not": False},
    "containing none": {"type": "array", "items": TEXT, "maxItems": 1, "contains": {"const": 7}, "minContains": 0},
    "counts of nothing": {"type": "array", "items": TEXT, "maxItems": 1, "minContains": 3, "maxContains": 1},
    "multiples that all are": {"type": "integer", "minimum": 0, "maximum": 99, "multipleOf": 1},
    "multiples of a part": {"type": "integer", "minimum": 0, "maximum": 99, "multipleOf": 0.01},
    "names called as keywords": {
        "type": "object",
        "properties": dict.fromkeys(("format", "not", "uniqueItems", "if", "propertyNames", "enum", "const"), TEXT),
        "required": ["format", "not", "uniqueItems", "if", "propertyNames", "enum", "const"],
        "additionalProperties": False,
    },
    "values that look like schemas": {"enum": [{"format": "x", "uniqueItems": False}], "default": {"not": False}},
}
NAMES: dict[str, Any] = {
    "all": True,
    "any": {},
    "texts": {"type": "string"},
    "described": {"type": "string", "description": "a key"},
    "of some length": {"minLength": 0},
    "of an unknown format": {"format": "path"},
    "of a defined type": {"$ref": "#/$defs/key"},
    "listed": {"enum": ["red", "a/b", "c.d", "e\n"]},
    "named": {"const": "red"},
    "of an enumeration": {"$ref": "#/$defs/colour"},
    "at most that long": {"maxLength": 3},
    "at least that long": {"type": "string", "minLength": 2, "maxLength": 3},
    "numbers, which none is": {"$ref": "#/$defs/number"},
}
OTHER_WORDS: dict[str, dict[str, Any]] = {
    "no further properties": {
        "type": "object",
        "properties": {"a": TEXT},
        "patternProperties": {"^x$": TEXT},
        "unevaluatedProperties": False,
    },
    "never there": {"type": "object", "properties": {"a": {"not": {}}, "b": TEXT}, "additionalProperties": False},
    "told apart by required tags": union(tagged({"const": "a"}, "kind"), tagged({"enum": ["b", "c"]}, "kind")),
    "told apart by tags with defaults": union(
        tagged({"const": "a", "default": "a"}),
        tagged({"const": "b", "default": "b"}),
        discriminator={"propertyName": "kind", "mapping": {"a": "#/$defs/B0", "b": "#/$defs/B1"}},
    ),
    "told apart by numbers": union(tagged({"const": 1}, "kind"), tagged({"const": True}, "kind")),
    "told apart by a union of tags": union(
        tagged({"anyOf": [{"const": "a"}, {"const": "b"}]}, "kind"), tagged({"const": "c"}, "kind")
    ),
    "told apart by types": {"oneOf": [{"type": "integer", "maximum": 5, "minimum": 0}, TEXT, {"type": "null"}]},
    "unions within unions": {
        "oneOf": [union(tagged({"const": "a"}, "kind"))["$defs"]["B0"], {"anyOf": [TEXT, {"type": "null"}]}]
    },
}


@pytest.mark.parametrize("schema", [*IDLE.values(), *OTHER_WORDS.values()], ids=[*IDLE, *OTHER_WORDS])
def test_answers_fit_what_generators_write(schema: dict[str, Any], grammars: Grammars, tokenizer: Tokenizer) -> None:
    valid = json.loads(json.dumps(schema))
    for key in [key for key, value in schema.items() if value is None]:
        del valid[key]  # jsonschema takes no null
    valid.pop("$schema", None)
    for answer in answers(schema, grammars, tokenizer):
        jsonschema.validate(answer, valid)


@pytest.mark.parametrize("names", NAMES.values(), ids=NAMES)
def test_keys_fit_property_names(names: Any, grammars: Grammars, tokenizer: Tokenizer) -> None:
    schema: dict[str, Any] = {
        "type": "object",
        "propertyNames": names,
        "additionalProperties": {"type": "boolean"},
        "maxProperties": 3,
        "$defs": {
            "key": {"type": "string", "format": "file-path"},
            "colour": {"type": "string", "enum": ["red", "blue"]},
            "number": {"type": "integer", "enum": [1, 2]},
        },
    }
    for answer in answers(schema, grammars, tokenizer):
        jsonschema.validate(answer, schema)


def test_property_names_bind_named_properties_too(grammars: Grammars, tokenizer: Tokenizer) -> None:
    schema = {
        "type": "object",
        "properties": {"red": {"type": "integer", "minimum": 0, "maximum": 9}, "green": TEXT},
        "propertyNames": {"enum": ["red", "blue"]},
        "additionalProperties": {"type": "boolean"},
        "required": ["red"],
    }
    for answer in answers(schema, grammars, tokenizer):
        jsonschema.validate(answer, schema)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "items": TEXT, "uniqueItems": True},
        {"type": "object", "propertyNames": {"pattern": "^a"}},
        {"type": "object", "propertyNames": {"maxLength": 3}, "properties": {"a": TEXT}},
        {"type": "object", "propertyNames": {"enum": ["a"]}, "patternProperties": {"b": TEXT}},
        {"type": "object", "dependentRequired": {"a": ["b"]}, "properties": {"a": TEXT}},
        {"type": "array", "contains": {"const": 1}},
        {"type": "string", "not": {"const": "a"}},
        {"type": "string", "if": {"minLength": 2}, "then": {"const": "ab"}},
        {"type": "array", "unevaluatedItems": False},
        {"type": "object", "allOf": [{"properties": {"a": TEXT}}], "unevaluatedProperties": False},
        {"type": "number", "multipleOf": 7, "enum": [8]},
        {"not": {}},
        {"oneOf": [{"type": "integer"}, {"type": "number"}]},
        {"oneOf": [{"enum": [1, 2]}, {"enum": [2.0, 3]}]},
        union(tagged({"const": "a"}), tagged({"const": "b"})),
        union(tagged({"const": "a"}, "kind"), tagged({"type": "string"}, "kind")),
        union(tagged({"const": 1}, "kind"), tagged({"const": 1.0}, "kind")),
    ],
    ids=lambda schema: json.dumps(schema)[:60],
)
def test_what_binds_is_never_passed_over(schema: dict[str, Any], grammars: Grammars) -> None:
    with pytest.raises(InvalidRequest):
        grammars.compile(join_parts([schema_part(schema, "answer", "schema")]))


def test_comparing_branches_ends() -> None:
    deep: dict[str, Any] = {"type": "object", "properties": {}, "required": [f"p{i}" for i in range(50)]}
    deep["properties"] = {name: {"$ref": "#/$defs/deep"} for name in deep["required"]}
    options = [{"$ref": "#/$defs/deep"} for _ in range(100)]
    assert "oneOf" in supported_schema({"oneOf": options, "$defs": {"deep": deep}})
