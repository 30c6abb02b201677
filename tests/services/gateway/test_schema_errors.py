"""Schemas and regexes that cannot be kept: the 400 names the field, the place in the schema and what is wrong there."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from tests.services.gateway.conftest import MODEL_NAME, MakeBench
from weft_mesh.v1 import inference_service_pb2 as pb2
from weft_mesh.v1.inference_service_pb2_grpc import InferenceServiceStub

USER: Any = {"role": "user", "content": "hi"}
REGEXES = {
    "^(?!a)b$": "look-ahead",
    "(?<=a)b": "look-behind",
    r"\bword": r"look-around is not supported (\b)",
    "a$b": "look-around is not supported ($)",
    "^(abc$": "unclosed group",
    "abc)$": "unopened group",
    "[a-": "unclosed character class",
    "[z-a]": "range",
    "a{2,1}": "repetition",
    "*a": "repetition",
    r"(x)\1": "backreference",
    r"a/\d\q": "escape",
    "(?<name": "group",
}


def schema(pattern: str) -> dict[str, Any]:
    amount = {"type": "string", "pattern": pattern}
    return {"type": "object", "properties": {"plain": {"pattern": "a"}, "amount": amount}, "required": ["amount"]}


@pytest.mark.parametrize(("pattern", "reason"), REGEXES.items(), ids=REGEXES)
async def test_regex_is_named_with_its_place(bench: MakeBench, pattern: str, reason: str) -> None:
    bound = {"name": "x", "schema": schema(pattern)}
    tool = {"type": "function", "function": {"name": "pay", "strict": True, "parameters": schema(pattern)}}
    other = {"type": "function", "function": {"name": "now"}}
    asked: list[tuple[dict[str, Any], str, str]] = [
        (
            {"response_format": {"type": "json_schema", "json_schema": bound}},
            "response_format.json_schema.schema",
            ".properties.amount.pattern",
        ),
        ({"guided_json": schema(pattern)}, "guided_json", ".properties.amount.pattern"),
        ({"guided_regex": pattern}, "guided_regex", ""),
        ({"structured_outputs": {"regex": pattern}}, "structured_outputs.regex", ""),
        ({"guided_json": {"patternProperties": {pattern: {}}}}, "guided_json", f".patternProperties.{pattern}"),
        ({"tools": [other, tool]}, "tools.1.function.parameters", ".properties.amount.pattern"),
        (
            {"tools": [other, tool], "response_format": {"type": "json_object"}},
            "tools.1.function.parameters",
            ".properties.amount.pattern",
        ),
        (
            {
                "response_format": {
                    "type": "structural_tag",
                    "triggers": ["<a>"],
                    "structures": [{"begin": "<a>", "end": "</a>"}, {"begin": "<a>", "schema": schema(pattern)}],
                }
            },
            "response_format.structures.1.schema",
            ".properties.amount.pattern",
        ),
    ]
    async with bench(tool_format="hermes") as b:
        for fields, param, path in asked:
            status, error = await b.refused("/v1/chat/completions", messages=[USER], **fields)
            assert (status, error["param"]) == (400, param)
            assert error["message"].startswith(f"{param}{path}: {pattern!r} is not supported: ")
            assert reason in error["message"]
        assert not b.decode.started


async def test_other_apis_name_it_in_their_own_words(bench: MakeBench) -> None:
    asked: list[tuple[str, dict[str, Any], str]] = [
        (
            "/v1/responses",
            {"input": "x", "text": {"format": {"type": "json_schema", "name": "x", "schema": schema("(a")}}},
            "text.format.schema",
        ),
        (
            "/v1/responses",
            {
                "input": "x",
                "tools": [
                    {"type": "web_search"},
                    {"type": "function", "name": "f", "strict": True, "parameters": schema("(a")},
                ],
            },
            "tools.1.parameters",
        ),
        (
            "/v1/messages",
            {
                "messages": [USER],
                "max_tokens": 5,
                "output_config": {"format": {"type": "json_schema", "schema": schema("(a")}},
            },
            "output_config.format.schema",
        ),
        (
            "/v1/messages",
            {
                "messages": [USER],
                "max_tokens": 5,
                "tools": [{"name": "f", "strict": True, "input_schema": schema("(a")}],
            },
            "tools.0.input_schema",
        ),
    ]
    async with bench(tool_format="hermes") as b:
        for path, fields, field in asked:
            answer = await b.http.post(path, json={"model": MODEL_NAME, **fields})
            assert answer.status_code == 400
            message = answer.json()["error"]["message"]
            assert message.startswith(f"{field}.properties.amount.pattern: '(a' is not supported: unclosed group")


async def test_grpc_names_it_too(bench: MakeBench) -> None:
    async with bench() as b, grpc.aio.insecure_channel(b.gateway.grpc_address) as channel:
        options = pb2.GenerationOptions(structured_outputs_json='{"regex": "(a"}')
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await anext(aiter(InferenceServiceStub(channel).Generate(pb2.GenerateRequest(text="x", options=options))))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "structured_outputs.regex: '(a' is not supported: unclosed group" in str(caught.value.details())


async def test_regex_of_a_grammar_is_named(bench: MakeBench) -> None:
    async with bench() as b:
        status, error = await b.refused("/v1/chat/completions", messages=[USER], guided_grammar="start: /(a/")
        assert (status, error["param"]) == (400, "guided_grammar")
        assert '"(a"' in error["message"]
        assert "unclosed group" in error["message"]


@pytest.mark.parametrize(
    ("own", "path", "what"),
    [
        ({"type": "array", "uniqueItems": True}, "uniqueItems", "is not supported"),
        ({"not": {"type": "string"}}, "not", "is not supported"),
        ({"propertyNames": {"pattern": "^a"}}, "propertyNames", "is not supported"),
        ({"$ref": "#/$defs/used"}, "$defs.used.contains", "is not supported"),
        ({"anyOf": [{"type": "null"}, {"dependentRequired": {"a": ["b"]}}]}, "anyOf.1.dependentRequired", "supported"),
        ({"oneOf": [{"type": "integer"}, {"minimum": 3}]}, "oneOf", "write anyOf"),
        ({"properties": {"a": {}}, "minProperties": 2}, "minProperties", "required"),
        ({"patternProperties": {"a": {}, "b": {}}}, "patternProperties", "two of these patterns"),
        ({"type": "any"}, "type", "'any' is no type"),
        ({"type": ["string", "undefined"]}, "type", "'undefined' is no type"),
        ({"type": "string", "maxLength": "7"}, "maxLength", 'got "7"'),
        ({"required": "a", "type": "object"}, "required", 'got "a"'),
    ],
    ids=str,
)
async def test_keyword_is_named_with_its_place(bench: MakeBench, own: dict[str, Any], path: str, what: str) -> None:
    defs = {"unused": {"not": {}, "contains": {}, "uniqueItems": True}, "used": {"type": "array", "contains": {}}}
    whole = {"type": "object", "properties": {"ok": {"type": "string", "maxLength": 7}, "own": own}, "$defs": defs}
    place = path if path.startswith("$defs") else f"properties.own.{path}"
    async with bench() as b:
        status, error = await b.refused("/v1/chat/completions", messages=[USER], guided_json=whole)
        assert (status, error["param"]) == (400, "guided_json")
        assert error["message"].startswith(f"guided_json.{place}: ")
        assert what in error["message"]


async def test_regex_of_a_loose_tool_is_left_out(bench: MakeBench) -> None:
    async with bench(tool_format="hermes") as b:
        for pattern in REGEXES:
            function = {"name": "pay", "parameters": {**schema(pattern), "patternProperties": {pattern: {}}}}
            for is_strict in (False, True):
                tools = [{"type": "function", "function": {**function, "strict": is_strict}}]
                body = {"model": MODEL_NAME, "messages": [USER], "tools": tools, "tool_choice": "required"}
                answer = await b.http.post("/v1/chat/completions", json=body)
                assert answer.status_code == (400 if is_strict else 200), answer.text
