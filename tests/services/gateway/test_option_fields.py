"""Every option of a request reaches every API, or that API rejects it."""

from __future__ import annotations

import math

import orjson
import pytest

from weft.errors import InvalidRequest
from weft_mesh.v1 import inference_service_pb2 as pb
from weft_services.gateway.dialects import anthropic_requests, responses_requests
from weft_services.gateway.dialects.body_checks import OPENAI_COMPLETION
from weft_services.gateway.dialects.openai_requests import (
    EXTENSION_FIELDS,
    ChatBody,
    CompletionBody,
    SamplingExtensions,
    parse_completion,
)
from weft_services.gateway.front.grpc_requests import JSON_OPTIONS, RENAMED_OPTIONS, _option_fields

# Fields of a chat completion that the other two APIs have in a form of their own.
OWN_FORM = {"messages", "tools", "tool_choice", "top_logprobs"}
CHAT_FIELDS = set(ChatBody.model_fields)
SET_OPTIONS = pb.GenerationOptions(
    max_tokens=7,
    temperature=0.5,
    top_p=0.25,
    top_k=3,
    min_p=0.125,
    seed=9,
    stop=["a", "b"],
    stop_token_ids=[4, 5],
    ignore_eos=True,
    num_logprobs=2,
    session_id="s",
    return_token_ids=True,
    frequency_penalty=0.5,
    presence_penalty=-0.5,
    repetition_penalty=1.5,
    logit_bias={3: 1.5},
    min_tokens=1,
    response_format_json='{"type": "text"}',
    structured_outputs_json='{"regex": "a+"}',
    priority=-2,
    reject_if_busy=True,
    n=2,
    prompt_cache_retention="24h",
    num_prompt_logprobs=1,
    speculation=False,
    prediction="as before",
)


def test_messages_api_passes_or_rejects_every_chat_field() -> None:
    passed = {*anthropic_requests.SAME, *anthropic_requests.RENAMED.values(), *OWN_FORM, "thinking"}
    # these two change no answer
    assert CHAT_FIELDS - passed - anthropic_requests.NEUTRAL_VALUES.keys() == {
        "prompt_cache_retention",
        "stream_options",
    }


def test_responses_api_passes_or_rejects_every_chat_field() -> None:
    passed = {*responses_requests.SAME, *OWN_FORM, "reasoning"}
    assert not CHAT_FIELDS - passed - responses_requests.NEUTRAL_VALUES.keys()


def test_completions_reject_every_field_of_chat_alone() -> None:
    # without tools it changes no answer
    assert CHAT_FIELDS - CompletionBody.model_fields.keys() - OPENAI_COMPLETION.keys() == {"parallel_tool_calls"}


def test_extensions_are_fields_of_chat_or_read_as_extra() -> None:
    read_as_extra = {"session_id", "structured_outputs", "guided_json", "guided_regex", "guided_grammar"}
    read_as_extra |= {"guided_choice", "json_schema", "regex", "ebnf", "grammar"}
    assert set(EXTENSION_FIELDS) - CHAT_FIELDS == read_as_extra
    assert len(set(EXTENSION_FIELDS)) == len(EXTENSION_FIELDS)


def test_grpc_options_have_the_names_of_body_fields() -> None:
    names = set(pb.GenerationOptions.DESCRIPTOR.fields_by_name)
    assert SamplingExtensions.model_fields.keys() <= names
    renamed = {(JSON_OPTIONS | RENAMED_OPTIONS).get(name, name) for name in names - {"num_logprobs"}}
    assert renamed <= CompletionBody.model_fields.keys() | set(EXTENSION_FIELDS)


def test_option_fields_hold_every_option_that_is_set() -> None:
    assert {option.name for option, _ in SET_OPTIONS.ListFields()} == set(
        pb.GenerationOptions.DESCRIPTOR.fields_by_name
    )
    assert _option_fields(SET_OPTIONS) == {
        "max_tokens": 7,
        "temperature": 0.5,
        "top_p": 0.25,
        "top_k": 3,
        "min_p": 0.125,
        "seed": 9,
        "stop": ["a", "b"],
        "stop_token_ids": [4, 5],
        "ignore_eos": True,
        "session_id": "s",
        "return_token_ids": True,
        "frequency_penalty": 0.5,
        "presence_penalty": -0.5,
        "repetition_penalty": 1.5,
        "logit_bias": {"3": 1.5},
        "min_tokens": 1,
        "response_format": {"type": "text"},
        "structured_outputs": {"regex": "a+"},
        "priority": -2,
        "reject_if_busy": True,
        "n": 2,
        "prompt_cache_retention": "24h",
        "prompt_logprobs": 1,
        "speculation": False,
        "prediction": {"type": "content", "content": "as before"},
    }


def test_option_fields_of_no_options_ask_for_nothing() -> None:
    plain = parse_completion(b'{"prompt": "x"}')
    fields = {"prompt": "x", **_option_fields(pb.GenerationOptions())}
    assert parse_completion(orjson.dumps(fields)) == plain


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_option_fields_reject_what_json_cannot_hold(value: float) -> None:
    with pytest.raises(InvalidRequest, match=r"options\.top_p: expected a number"):
        _option_fields(pb.GenerationOptions(top_p=value))
